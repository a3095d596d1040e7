"""The `lab` command, also as `python -m lab`. Ctrl-C while it imports ends it without a traceback
too."""

import gc
import sys


def main() -> None:
    gc.set_threshold(100_000)  # imports make many objects and no garbage
    try:
        from lab.main import main as command

        command()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
