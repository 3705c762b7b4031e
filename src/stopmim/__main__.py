"""``python -m stopmim``."""

import sys

from stopmim.cli import main

sys.exit(main())
