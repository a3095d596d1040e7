"""The `lab` command, also as `python -m lab`. Ctrl-C while it imports ends it without a traceback
too."""

import gc
import sys

from lab.errors import EXIT_INTERRUPTED


def main() -> None:
    gc.set_threshold(100_000)  # imports make many objects and no garbage
    try:
        from lab.main import main as command

        command()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
