"""Artifacts on disk: a content-addressed store, a manifest per arch, verification and garbage collection."""

from .errors import DamagedArtifact, ManifestError, RegistryError
from .manifest import Manifest
from .paths import checkout_root, default_root, search_path
from .store import Entry, Registry

__all__ = [
    "DamagedArtifact",
    "Entry",
    "Manifest",
    "ManifestError",
    "Registry",
    "RegistryError",
    "checkout_root",
    "default_root",
    "search_path",
]
