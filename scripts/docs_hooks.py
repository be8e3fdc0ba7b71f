"""What MkDocs does otherwise for the site of docs/: the README is its home page, and lists nest as on a git host."""

import posixpath
import re
from pathlib import Path

from markdown import Markdown
from markdown.blockprocessors import build_block_parser
from markdown.extensions import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

README = Path(__file__).absolute().parent.parent / "README.md"
HOME = "index.md"
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")
END_OF_NESTED = re.compile(r"(?:^ {2,3}```|(?<=\n\n) {2,3}\S.*)\n(?=(?:\*|\d+\.) )", re.MULTILINE)


class NestByTwo(Extension):
    """Two spaces nest what follows them in a list, as in CommonMark; Markdown in Python asks for four."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Make the parser of blocks again: it takes the width of a level when it is made."""
        md.tab_length = 2
        md.parser = build_block_parser(md)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension before those that add to the parser of blocks."""
    config.markdown_extensions.insert(0, NestByTwo())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page."""
    files.append(File.generated(config, HOME, content=README.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links from and to the README, which lies one folder above the other pages, into links of the site.

    An item of a list after a nested block gets the blank line that Markdown in Python asks for.
    """
    source = page.file.src_uri
    folder = "" if source == HOME else posixpath.join("docs", posixpath.dirname(source))

    def link_on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[0]))
        on_site = HOME if target == README.name else target.removeprefix("docs/")
        return posixpath.relpath(on_site, posixpath.dirname(source) or ".")

    return END_OF_NESTED.sub(r"\g<0>\n", LINK.sub(link_on_site, markdown))
