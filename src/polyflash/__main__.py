"""The command `polyflash`, and `python -m polyflash`."""

import sys

from polyflash import env


def main() -> int:
    """Runs one command; returns its exit code. Reports need neither torch nor rich."""
    if env.only_reports():
        from polyflash import reports

        return reports.main()
    from polyflash import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
