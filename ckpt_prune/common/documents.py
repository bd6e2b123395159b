"""Find the documents that messages name. A wheel has them inside the package, since its users have no checkout."""

from pathlib import Path


def find_document(name: str) -> Path:
    """Return the path of a document of the package or of `recipes`, which a wheel has inside the package."""
    package = Path(__file__).parents[1]
    return package / name if (package / name).exists() else package.parent / name
