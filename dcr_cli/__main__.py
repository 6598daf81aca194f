"""python -m dcr_cli"""

import sys

from dcr_cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
