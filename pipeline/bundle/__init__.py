"""One file with the evidence for the answers of a run, written by `seenset pack` and checked by `seenset verify`."""
