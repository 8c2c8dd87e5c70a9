"""Run the command line with ``python -m holdfast``."""

import sys

from holdfast.cli.app import main

sys.exit(main())
