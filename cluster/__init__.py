"""Settings of the cluster and of distributed training."""

import sys

from pipeline.config.retired import retired

_module = "".join(sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1]) if "-m" in sys.orig_argv else ""
if (_line := retired("module", _module)) is not None:
    print(_line, file=sys.stderr)
    raise SystemExit(2)
