"""Completion of flags in bash, Trainer arguments in the bare form too: ``python -m project.tools.completion > FILE``.

The script names all flags of the default classes, so that a press of TAB starts no Python. For flags of classes of
your own, give what chooses them: ``python -m project.tools.completion --config mlp.yaml > FILE``.
"""

import sys

from project.cli import CLI
from project.mistakes import _names
from project.usage import COMMANDS, TRAINER

SCRIPT = """\
# Flags of train.py; source this file in ~/.bashrc.
_train_py() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} first=${{COMP_WORDS[0]}} before
    COMPREPLY=()
    case $first in python*) before=${{COMP_WORDS[1]}} ;; *) before=$first ;; esac
    case $before in train.py | */train.py) ;; *) return ;; esac
    case $word in
        -*) mapfile -t COMPREPLY < <(compgen -W "{flags}" -- "$word") ;;
        *) mapfile -t COMPREPLY < <(compgen -f -- "$word"; compgen -W "{commands}" -- "$word") ;;
    esac
}}
complete -o default -F _train_py python python3 train.py ./train.py
"""


class Parsed(CLI):
    """The settings alone."""

    def before_instantiate_classes(self) -> None:
        """Nothing will run."""

    def instantiate_classes(self) -> None:
        """Nothing is made."""


def script(argv: list[str]) -> str:
    """The completion script, for what a command line with these flags could go on with."""
    names = _names(Parsed(argv).parser)  # type: ignore[arg-type]  # it is our Parser
    flags = {f"--{name}" for name in names | TRAINER if "init_args" not in name}
    return SCRIPT.format(flags=" ".join(sorted(flags)), commands=" ".join(COMMANDS))


if __name__ == "__main__":
    print(script(sys.argv[1:]), end="")
