"""The `lab` command, also as `python -m lab`. Ctrl-C while it imports ends it without a traceback too."""

import sys


def main() -> None:
    try:
        from lab.main import main as command

        command()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
