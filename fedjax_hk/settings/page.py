"""`python -m fedjax_hk.settings.page > docs/settings.md`: every setting, as a page."""

from __future__ import annotations

from fedjax_hk.settings.config import SETTINGS, readers
from fedjax_hk.settings.setting import KINDS, Setting


def settings_page() -> str:
    """Markdown: a table a group, a row a setting."""
    lines = [
        "# Settings",
        "",
        "Made by `python -m fedjax_hk.settings.page`. A setting that none of the choices made "
        "reads is refused, with what to use instead. Kinds:",
        "",
        *(f"- {kind}: {text}." for kind, text in KINDS.items()),
    ]
    groups: dict[str, list[Setting]] = {}
    for known in SETTINGS.values():
        groups.setdefault(known.group, []).append(known)
    for group, members in groups.items():
        lines += ["", f"## {group}", ""]
        lines += [
            "| flag | default | kind | what it is | read by |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [_row(known) for known in members]
    return "\n".join(lines) + "\n"


def _row(known: Setting) -> str:
    unset = known.default if known.default not in (None, "") else known.unset
    text = known.help + (f": {', '.join(known.choices)}" if known.choices else "")
    who = "; ".join(f"{table} {', '.join(names)}" for table, names in readers(known.name).items())
    cells = (f"`--{known.name}`", "" if unset is None else f"`{unset}`", known.kind, text, who)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(settings_page(), end="")
