"""`z2a completion bash|zsh|fish`: a script that completes verbs, flags, runs, configs and config fields.

The scripts are generated from the parser. Each has the same four functions over a verb: the verbs below it, its flags,
what may follow a flag, and what its positional words are. Words that begin with a colon stand for what the shell looks
up when Tab is pressed: `:runs` in the workspace, `:files`, `:folders`, `:nothing`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field

from zero2all.cli.parser import Parser
from zero2all.cli.verb import verb

SHELLS = ("bash", "zsh", "fish")


@verb("""
    completion: print a completion script for your shell

    shell bash|zsh|fish  bash, zsh or fish

    z2a completion bash

    to install it, write it where your shell looks for completions:
    z2a completion bash > ~/.local/share/bash-completion/completions/z2a
    z2a completion zsh > ~/.zfunc/_z2a   # fpath+=~/.zfunc; compinit
    z2a completion fish > ~/.config/fish/completions/z2a.fish
    """)
def _completion(arguments: argparse.Namespace) -> None:
    print(script_for(arguments.shell, arguments.whole_parser()), end="")


@dataclass
class Words:
    """What may be typed; every key is a verb such as `corpus build`."""

    verbs: dict[str, list[str]] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)
    """`corpus build --format` -> what may follow; a flag that takes no value is left out."""
    positionals: dict[str, list[str]] = field(default_factory=dict)


def words_of(parser: Parser) -> Words:
    """All words of the command line."""
    words = Words()
    shared = [flag for flag in parser.flags if flag.startswith("--") and flag != "--version"]
    for name, inner in _tree(parser):
        words.verbs[name] = list(inner.verbs)
        own = [flag for flag in inner.flags if flag.startswith("--")]
        words.flags[name] = list(dict.fromkeys([*own, *shared]))
        words.positionals[name] = [word for action in inner.positionals for word in _values(action, inner)]
        for flag, action in {**parser.flags, **inner.flags}.items():
            if flag.startswith("--") and action.nargs != 0:
                words.values[f"{name} {flag}".strip()] = _values(action, inner)
        if inner.get_default("reads_config"):
            words.flags[name].append(":fields")
    # `z2a eval RUN` is `z2a eval run RUN`.
    for by_verb in (words.flags, words.positionals):
        by_verb["eval"] = by_verb["eval run"]
    for key in [key for key in words.values if key.startswith("eval run --")]:
        words.values[key.replace("eval run", "eval", 1)] = words.values[key]
    words.positionals["help"] = list(parser.verbs)
    return words


def _tree(parser: Parser, name: str = "") -> Iterator[tuple[str, Parser]]:
    yield name, parser
    for word, inner in parser.verbs.items():
        yield from _tree(inner, f"{name} {word}".strip())


def _values(action: argparse.Action, verb: Parser) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    metavar = str(action.metavar)
    if not action.option_strings and action.dest == verb.get_default("run_argument"):
        return [":runs", ":files"] if "FOLDER" in metavar else [":runs"]
    if "CONFIG" in metavar:
        return ["bench", ":configs"] if "bench" in metavar else [":configs"]
    if metavar == "DIR":
        return [":folders"]
    if any(word in metavar for word in ("FILE", "PATH", "FOLDER")):
        return [":files"]
    return [":nothing"]


def script_for(shell: str, parser: Parser) -> str:
    """The script of one shell."""
    from zero2all.cli.fields import field_names
    from zero2all.config import preset_files

    words = words_of(parser)
    presets, fields = list(preset_files()), [f"--{name}" for name in field_names()]
    functions = _fish_functions if shell == "fish" else _case_functions
    main = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell]
    head = "#compdef z2a\n" if shell == "zsh" else ""
    made = f"{head}# Made by `z2a completion {shell}`; run that again after an update.\n"
    return f"{made}{functions(words, presets, fields)}{main}"


def _tables(words: Words) -> dict[str, dict[str, list[str]]]:
    return {"verbs": words.verbs, "flags": words.flags, "values": words.values, "positionals": words.positionals}


def _case_functions(words: Words, presets: list[str], fields: list[str]) -> str:
    """The data as functions that bash and zsh both read."""
    lines = []
    for name, table in _tables(words).items():
        lines.append(f'_z2a_{name}() {{\n    case "$1" in')
        lines += [f"    '{key}') echo '{' '.join(found)}' ;;" for key, found in table.items() if found]
        lines.append("    esac\n}")
    lines.append(f"_z2a_presets() {{\n    echo '{' '.join(presets)}'\n}}")
    lines.append(f"_z2a_fields() {{\n    echo '{' '.join(fields)}'\n}}")
    return "\n".join(lines) + "\n"


def _fish_functions(words: Words, presets: list[str], fields: list[str]) -> str:
    lines = []
    for name, table in _tables(words).items():
        lines.append(f'function __z2a_{name}\n    switch "$argv[1]"')
        lines += [
            f"        case '{key}'\n            string split ' ' -- '{' '.join(found)}'"
            for key, found in table.items()
            if found
        ]
        lines.append("    end\nend")
    lines.append(f"function __z2a_presets\n    string split ' ' -- '{' '.join(presets)}'\nend")
    lines.append(f"function __z2a_fields\n    string split ' ' -- '{' '.join(fields)}'\nend")
    return "\n".join(lines) + "\n"


BASH = r"""
_z2a_runs() {
    local folder
    for folder in "$1"/runs/*/; do
        [ -d "$folder" ] && folder=${folder%/} && printf '%s\n' "${folder##*/}"
    done
}

_z2a() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    local verb='' work=${Z2A_WORK:-.} found word place
    for ((place = 1; place < COMP_CWORD; place++)); do
        word=${COMP_WORDS[place]}
        [ "${COMP_WORDS[place-1]}" = --work ] && work=${word/#\~/$HOME}
        case " $(_z2a_verbs "$verb") " in *" $word "*) verb="${verb:+$verb }$word" ;; esac
    done
    found=$(_z2a_values "${verb:+$verb }$before")
    if [ -z "$found" ]; then
        case $current in
        -*) found=$(_z2a_flags "$verb") ;;
        *) found="$(_z2a_verbs "$verb") $(_z2a_positionals "$verb")" ;;
        esac
    fi
    local names='' IFS=$' \t\n'
    COMPREPLY=()
    for word in $found; do
        case $word in
        :runs) names+=$(_z2a_runs "$work")$'\n' ;;
        :configs) names+=$(_z2a_presets | tr ' ' '\n')$'\n'$(compgen -f -- "$current")$'\n' ;;
        :fields) names+=$(_z2a_fields | tr ' ' '\n')$'\n' ;;
        :files) names+=$(compgen -f -- "$current")$'\n' ;;
        :folders) names+=$(compgen -d -- "$current")$'\n' ;;
        :nothing) ;;
        *) names+=$word$'\n' ;;
        esac
    done
    case " $found " in *' :'*) compopt -o filenames 2>/dev/null ;; esac
    while IFS= read -r word; do
        [ -n "$word" ] && case $word in "$current"*) COMPREPLY+=("$word") ;; esac
    done <<<"$names"
    return 0
}
complete -F _z2a z2a
"""

ZSH = r"""
_z2a() {
    local current=$words[CURRENT] before=$words[CURRENT-1]
    local verb='' workspace=${Z2A_WORK:-.} found word place
    for ((place = 2; place < CURRENT; place++)); do
        word=$words[place]
        [[ $words[place-1] == --work ]] && workspace=${~word}
        case " $(_z2a_verbs "$verb") " in *" $word "*) verb="${verb:+$verb }$word" ;; esac
    done
    found=$(_z2a_values "${verb:+$verb }$before")
    if [[ -z $found ]]; then
        if [[ $current == -* ]]; then
            found=$(_z2a_flags "$verb")
        else
            found="$(_z2a_verbs "$verb") $(_z2a_positionals "$verb")"
        fi
    fi
    for word in ${=found}; do
        case $word in
        :runs) compadd -- "$workspace"/runs/*(N/:t) ;;
        :configs) compadd -- ${=$(_z2a_presets)}; _files -g '*.(yaml|yml)' ;;
        :fields) compadd -- ${=$(_z2a_fields)} ;;
        :files) _files ;;
        :folders) _files -/ ;;
        :nothing) ;;
        *) compadd -- "$word" ;;
        esac
    done
}
if [[ $funcstack[1] == _z2a ]]; then
    _z2a "$@"
else
    compdef _z2a z2a
fi
"""

FISH = r"""
function __z2a_complete
    set -l typed (commandline -opc)
    set -l current (commandline -ct)
    set -l verb ''
    set -l work .
    set -q Z2A_WORK; and test -n "$Z2A_WORK"; and set work $Z2A_WORK
    set -l before z2a
    for word in $typed[2..-1]
        test "$before" = --work; and set work (string replace -r '^~' $HOME -- $word)
        if contains -- $word (__z2a_verbs "$verb")
            set verb (string trim -- "$verb $word")
        end
        set before $word
    end
    set -l found (__z2a_values (string trim -- "$verb $before"))
    if test -z "$found"
        if string match -q -- '-*' $current
            set found (__z2a_flags "$verb")
        else
            set found (__z2a_verbs "$verb") (__z2a_positionals "$verb")
        end
    end
    for word in $found
        switch $word
            case :runs
                for folder in $work/runs/*/
                    basename $folder
                end
            case :configs
                __z2a_presets
                __fish_complete_path $current
            case :fields
                __z2a_fields
            case :files
                __fish_complete_path $current
            case :folders
                __fish_complete_directories $current
            case :nothing
            case '*'
                echo $word
        end
    end
end
complete -c z2a -f -a '(__z2a_complete)'
"""
