"""The command `roll`, which says so where another package of the import name `roll` is installed."""

import sys


def main() -> int:
    """Runs a command and returns its exit code."""
    try:
        import roll

        if not hasattr(roll, "check_installation"):
            fix = "take it off PYTHONPATH; if it is installed, `pip uninstall roll` and reinstall roll-posttraining"
            raise ImportError(f"{roll.__path__[0]}: not the package of roll-posttraining; {fix}", name="roll")
    except ImportError as error:
        if error.name != "roll":
            raise
        print(error, file=sys.stderr)
        return 2
    from roll.cli import main as command

    return command()
