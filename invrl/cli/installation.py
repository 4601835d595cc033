"""How invrl was installed, as far as the fix of a missing package depends on it: from a checkout, whose
`launch/install.sh` makes everything, or as a package (a wheel), which pip completes."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
REQUIREMENTS = PACKAGE / "requirements"
"""Pinned versions, and the packages that are installed without what they depend on."""
_INSTALL_SCRIPT = PACKAGE.parent / "launch" / "install.sh"


def install_command(*, gpu: bool) -> str:
    """The shell command that installs what is missing, of paths that are there."""
    if _INSTALL_SCRIPT.is_file():
        return f"INVRL_DEVICE={'gpu' if gpu else 'cpu'} {_INSTALL_SCRIPT}"
    extra, suffix = ("gpu", "-gpu") if gpu else ("cpu", "")
    return (
        f"pip install -c {REQUIREMENTS}/constraints{suffix}.txt 'invrl[{extra}]' && "
        f"pip install --no-deps -r {REQUIREMENTS}/nodeps{suffix}.txt"
    )
