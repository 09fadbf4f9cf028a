"""The documents name what is in the tree, all of it and nothing else."""

import re
from pathlib import Path

import pytest

from deploy.metrics_page import metrics_text
from service.http_api import http_api_text

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
LAYERS = ("placement", "actors", "service", "deploy")


def modules_of(layer: str) -> set[str]:
    """Names below the layer, without suffix: ``ids``, ``engines/vllm_private``."""
    paths = (ROOT / layer).rglob("*.py")
    return {
        str(path.relative_to(ROOT / layer).with_suffix(""))
        for path in paths
        if path.name != "__init__.py"
    }


def modules_named_for(layer: str) -> set[str]:
    text = (ROOT / "docs/architecture.md").read_text()
    sections = re.split(r"^### ", text, flags=re.MULTILINE)
    (section,) = [s for s in sections if s.startswith(f"{layer}:")]
    return set(re.findall(r"^\| `([\w/]+)` \|", section, flags=re.MULTILINE))


@pytest.mark.parametrize("layer", LAYERS)
def test_the_architecture_has_a_sentence_for_every_module_and_no_other(layer: str) -> None:
    assert modules_named_for(layer) == modules_of(layer)


def test_the_http_api_is_documented_as_it_is() -> None:
    """After a change: ``python -m service.http_api > docs/http-api.md``."""
    assert (ROOT / "docs/http-api.md").read_text() == http_api_text()


def test_the_metrics_are_documented_as_they_are() -> None:
    """After a change: ``python -m deploy.metrics_page > docs/metrics.md``."""
    assert (ROOT / "docs/metrics.md").read_text() == metrics_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_in_documents_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    paths = re.findall(r"`((?:placement|actors|service|deploy|docs|benchmarks)/[\w./-]+)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []
