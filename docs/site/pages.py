"""A hook of MkDocs: pages that lie outside of docs/ are on the site too, and links between them and docs/ hold.

On disk, and on a server of git repositories, docs/watch.md links to ../bench/results/README.md, and CONTRIBUTING.md to
docs/watch.md. On the site docs/ is the root, and bench/results/ and CONTRIBUTING.md are in it. Only places of links
change, so MkDocs checks each of them. The page of errors gets its text from the table in fastddp/errors.py. A line that
is but a link to a section of README.md becomes that section, so that its numbers stand in one place.
"""

import posixpath
import re
import runpy
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results"
OUTSIDE = [
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "mutants" / "README.md",
    RESULTS / "README.md",
    *sorted(RESULTS.glob("*.png")),
]

_SECTION = re.compile(r"^\[([^\]\n]+)\]\(\.\./README\.md#[\w-]+\)$", re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures outside of docs/, under their paths in the repository."""
    for path in OUTSIDE:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def errors() -> str:
    """A section for each code, so that its anchor is the code, after a table of all."""
    table = runpy.run_path(str(ROOT / "fastddp" / "errors.py"))["ERRORS"]
    rows = "".join(f"| [{code}](#{code.lower()}) | {error.title} |\n" for code, error in table.items())
    sections = "".join(
        f"\n## {code}\n\n**{error.title}.** {_of_markdown(error.cause)}\n\n{_of_markdown(error.remedy)}\n"
        for code, error in table.items()
    )
    return f"\n| code | error |\n|---|---|\n{rows}{sections}"


def _of_markdown(text: str) -> str:
    return re.sub(r"docs/(\w+\.md)", r"[\g<0>](\1)", re.sub(r"([_*\[\]<>])", r"\\\1", text))


def section_of_readme(link: re.Match[str]) -> str:
    """The section that the link has for its text, with links as a page in docs/ would have them."""
    for section in re.split(r"^(?=## )", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        if section.startswith(f"## {link[1]}\n"):
            return _LINK.sub(r"\1../\2\3", section.rstrip())
    raise PluginError(f"README.md has no section {link[1]!r}.")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has their targets, and write what errors mean and README.md says."""
    outside = {path.relative_to(ROOT).as_posix() for path in OUTSIDE}
    place = page.file.src_uri
    if place == "errors.md":
        markdown += errors()
    markdown = _SECTION.sub(section_of_readme, markdown)
    in_repository = place if place in outside else f"docs/{place}"

    def changed(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), link[2]))
        on_site = target.removeprefix("docs/")
        return link[1] + posixpath.relpath(on_site, posixpath.dirname(place) or ".") + link[3]

    parts = _CODE.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(changed, part) for number, part in enumerate(parts))
