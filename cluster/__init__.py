"""What Seenset runs on: settings of the cluster and of the software under a training."""
