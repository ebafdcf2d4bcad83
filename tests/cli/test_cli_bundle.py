from __future__ import annotations

import re
from pathlib import Path

from kda_tl.registry import Registry


def test_out_and_in(run, fill, tmp_path: Path) -> None:
    fill(tmp_path / "from")
    file = tmp_path / "kernels.tar"
    result = run("bundle", "export", file, "--registry", tmp_path / "from")
    assert result.exit_code == 0 and "2 for cpu, 1 for sm_90" in result.output
    sha256 = re.search(r"sha256 ([0-9a-f]{64})", result.output)[1]

    result = run("bundle", "import", file, "--registry", tmp_path / "to", "--sha256", sha256)
    assert result.exit_code == 0 and str(tmp_path / "to") in result.output
    assert run("verify", "--registry", tmp_path / "to").exit_code == 0
    assert {entry.id for entry in Registry(tmp_path / "to").entries()} == {"cpu-one", "cpu-two", "gpu-one"}


def test_one_arch(run, fill, tmp_path: Path) -> None:
    fill(tmp_path / "from")
    result = run("bundle", "export", tmp_path / "x.tar", "--arch", "sm_90", "--registry", tmp_path / "from")
    assert (
        result.exit_code == 0 and "1 for sm_90" in result.output and "cpu" not in result.output.split("sha256")[0].split(":")[1]
    )


def test_the_default_registry(run, fill, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KDA_TL_REGISTRY", str(tmp_path / "mine"))
    fill(tmp_path / "mine")
    assert run("bundle", "export", tmp_path / "x.tar").exit_code == 0
    monkeypatch.setenv("KDA_TL_REGISTRY", str(tmp_path / "other"))
    assert run("bundle", "import", tmp_path / "x.tar").exit_code == 0
    assert Registry(tmp_path / "other").archs() == ["cpu", "sm_90"]


def test_errors_are_one_line(run, fill, tmp_path: Path) -> None:
    result = run("bundle", "export", tmp_path / "x.tar", "--registry", tmp_path / "none")
    assert result.exit_code == 1 and result.output.startswith("Error: ") and "no artifacts" in result.output
    (tmp_path / "x.tar").write_bytes(b"no tar")
    result = run("bundle", "import", tmp_path / "x.tar", "--registry", tmp_path / "to")
    assert result.exit_code == 1 and result.output.startswith("Error: ") and "not a bundle" in result.output
    result = run("bundle", "import", tmp_path / "x.tar", "--sha256", 64 * "0", "--registry", tmp_path / "to")
    assert result.exit_code == 1 and "has sha256" in result.output
    for malformed in ("", "00", 64 * "x"):
        result = run("bundle", "import", tmp_path / "x.tar", "--sha256", malformed, "--registry", tmp_path / "to")
        assert result.exit_code == 2 and "has 64 hexadecimal digits" in result.output
    fill(tmp_path / "from")
    result = run("bundle", "export", tmp_path / "no" / "folder" / "x.tar", "--registry", tmp_path / "from")
    assert result.exit_code == 1 and result.output.startswith("Error: ")
