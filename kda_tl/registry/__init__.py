"""Artifacts on disk: a content-addressed store, a manifest per arch, verification and garbage collection."""

from .bundle import Bundled, BundleError, export_bundle, import_bundle
from .errors import DamagedArtifact, ManifestError, RegistryError
from .manifest import Manifest
from .paths import checkout_root, default_root, install_command, is_writable, named_roots, search_path
from .store import ARTIFACT_FORMAT, Entry, Registry, Served

__all__ = [
    "ARTIFACT_FORMAT",
    "BundleError",
    "Bundled",
    "DamagedArtifact",
    "Entry",
    "Manifest",
    "ManifestError",
    "Registry",
    "RegistryError",
    "Served",
    "checkout_root",
    "default_root",
    "export_bundle",
    "import_bundle",
    "install_command",
    "is_writable",
    "named_roots",
    "search_path",
]
