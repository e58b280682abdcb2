"""Devices, precision, and when a model is compiled. Several processes are in
test_distributed.py."""
from types import SimpleNamespace

import pytest
import torch

import parallel
from parallel import Processes


@pytest.mark.parametrize("instructions", [{}, dict(amx_bf16=True), dict(avx512_bf16=True)])
def test_autocast_is_bfloat16_where_there_are_instructions(monkeypatch, instructions):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    Z, found = torch.ones(2, 2), {}
    for dtype in ("auto", "float32", "bfloat16"):
        with Processes("cpu", dtype).autocast():
            found[dtype] = (Z @ Z).dtype
    auto = torch.bfloat16 if instructions else torch.float32
    assert found == dict(auto=auto, float32=torch.float32, bfloat16=torch.bfloat16)


def test_a_cpu_compiles_long_runs_in_bfloat16_if_it_can(monkeypatch, capsys):
    def wanted(compile, dtype, flops, device="cpu"):
        processes = SimpleNamespace(device=torch.device(device), rank=0, half=dtype == "bfloat16")
        return parallel.wants_compile(SimpleNamespace(compile=compile), processes, flops)
    monkeypatch.setattr(parallel.shutil, "which", lambda compiler: f"/usr/bin/{compiler}")
    assert wanted(None, "bfloat16", 6e13) and not wanted(None, "bfloat16", 4e13)
    assert not wanted(None, "float32", 1e18) and wanted(True, "float32", 0)
    assert wanted(None, "float32", 0, "cuda") and not wanted(False, "float32", 1e18, "cuda")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(parallel.shutil, "which", lambda compiler: None)
    assert not wanted(True, "float32", 0) and not wanted(None, "bfloat16", 6e13)
    assert capsys.readouterr().out.count("note: not compiled, since there is no C++ compiler") == 2
    assert not wanted(None, "float32", 1e18) and capsys.readouterr().out == ""
