"""The profile of a layer: on the CPU from end to end, and as a GPU's traces and programs describe themselves."""

import json
import os
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jmla.bench import profile, trace
from tests.tiny import V4


@pytest.mark.slow
def test_a_small_layer_from_end_to_end(tmp_path, capsys):
    """Every part of the layer is seen, and nearly all of the time belongs to one."""
    written = tmp_path / "profile.json"
    profile.run(V4, ("csa", "hca"), (2,), 256, str(written), None)
    said, layers = capsys.readouterr().out, json.loads(written.read_text(encoding="utf-8"))["layers"]
    assert [(layer["kind"], layer["rows"], layer["context"]) for layer in layers] == [("csa", 2, 256), ("hca", 2, 256)]
    for layer in layers:
        parts = {part["part"]: part for part in layer["parts"]}
        expected = set(profile.PARTS.values()) - {"slots", "selection around scores and top-k", "rotary tables"}
        if layer["kind"] == "hca":
            expected -= {"index scores", "top-k"}
        assert expected <= set(parts)
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
        assert parts.get(profile.REST, {"share": 0})["share"] < 0.25
        assert parts["attention"]["launches"] >= 1
        assert sum(kernel["us"] for kernel in layer["kernels"]) == pytest.approx(
            sum(part["us"] for part in parts.values())
        )
        assert 0 < layer["us"] <= layer["span_us"] * (1 + 1e-6)
        assert f"### {layer['kind']} layer, 2 rows, context 256" in said
    assert "| attention | " in said


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    parts = [{"part": name, "share": 0.5, "us": 7.0, "launches": 1} for name in ("attention", "packing")]
    layer = {"kind": "csa", "rows": 1, "context": 256, "us": 14.0, "parts": parts}
    profile.plot([layer, layer | {"rows": 64}], str(tmp_path / "profile.png"))
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


PROGRAM = """HloModule jit_step

FileNames
1 "/site/jmla/models/v4.py"
2 "/site/jmla/kernels/kv_pack/triton.py"
3 "/site/jmla/models/layers.py"
4 "/elsewhere/project.py"

FunctionNames
1 "V4Layer.project"
2 "kv_pack"
3 "product"
4 "V4Layer.__call__"
5 "collapse"

FileLocations
1 {file_name_id=1 function_name_id=4 line=1 end_line=1 column=1 end_column=1}
2 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=1}
3 {file_name_id=3 function_name_id=3 line=1 end_line=1 column=1 end_column=1}
4 {file_name_id=2 function_name_id=2 line=1 end_line=1 column=1 end_column=1}
5 {file_name_id=4 function_name_id=5 line=1 end_line=1 column=1 end_column=1}

StackFrames
FRAMES

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add.7 = f32[8]{0} add(%p, %p), metadata={op_name="jit(step)/add" stack_frame_id=3}
}

ENTRY %main (x: f32[8]) -> (f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %dot.1 = f32[8]{0} dot(%x, %x), metadata={op_name="jit(step)/dot_general" stack_frame_id=3}
  %fusion.2 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %custom-call.3 = (f32[8]{0}, u8[4]{0}) custom-call(%x), metadata={op_name="jit(step)/triton" stack_frame_id=4}
  %copy.4 = f32[8]{0} copy(%x)
  %neg.5 = f32[8]{0} negate(%x), metadata={op_name="jit(step)/neg" stack_frame_id=5}
  ROOT %tuple = (f32[8]{0}, f32[8]{0}) tuple(%x, %x)
}
"""


@pytest.mark.parametrize("shift", [0, 1], ids=["parents by number", "parents by number plus one"])
def test_parts_of_instructions(shift):
    """The innermost frame that says something decides; a fusion without frames is what its root is."""
    parents = {1: None, 2: 1, 3: 2, 4: 1, 5: 1}
    frames = [
        f"{number} {{file_location_id={number}"
        + (f" parent_frame_id={(parent or 0) + shift}" if parent or shift else "")
        + "}"
        for number, parent in parents.items()
    ]
    found = profile.provenance(PROGRAM.replace("FRAMES", "\n".join(frames)))
    assert {name: (found[name].opcode, found[name].part) for name in found if name[0] not in "xpt"} == {
        "add.7": ("add", "projections"),
        "dot.1": ("dot", "projections"),
        "fusion.2": ("fusion", "projections"),
        "custom-call.3": ("custom-call", "packing"),
        "copy.4": ("copy", profile.REST),
        "neg.5": ("negate", profile.REST),  # a function of that name, but not of the models
    }


def plane(name: str, lines: dict[str, list[tuple[str, float, float, dict[str, Any]]]]) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        lines=[
            SimpleNamespace(
                name=line,
                events=[
                    SimpleNamespace(name=n, start_ns=start, duration_ns=length, stats=list(stats.items()))
                    for n, start, length, stats in events
                ],
            )
            for line, events in lines.items()
        ],
    )


def test_events_of_a_gpu_are_those_of_its_streams(tmp_path, monkeypatch):
    (tmp_path / "host.xplane.pb").touch()
    planes = [
        plane("/host:CPU", {"python": [("dot.1", 0, 9000, {"hlo_op": "dot.1"})]}),
        plane(
            "/device:GPU:0",
            {
                "Stream #13(Compute)": [
                    ("gemm", 1000, 2000, {"hlo_op": "dot.1", "hlo_module": "jit_step"}),
                    ("gemm", 5000, 2000, {"hlo_op": "dot.1"}),
                    ("_pack", 6000, 3000, {"hlo_op": "custom-call.3"}),
                ],
                "Stream #14(MemcpyD2H)": [
                    ("MemcpyD2H", 20000, 1000, {"hlo_op": "conditional.9"}),
                    ("odd", 30000, 0, {}),
                ],
                "XLA Ops": [("dot.1", 1000, 2000, {"hlo_op": "dot.1"})],
            },
        ),
    ]
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda _: SimpleNamespace(planes=planes))
    seen = list(trace.events(str(tmp_path)))
    assert [event.name for event in seen] == ["gemm", "gemm", "_pack", "MemcpyD2H", "odd"]
    assert trace.busy_us(seen) == 2 + 4 + 1
    instructions = {
        "dot.1": profile.Instruction("dot", "projections"),
        "custom-call.3": profile.Instruction("custom-call", "packing"),
        "conditional.9": profile.Instruction("conditional", "experts"),
    }
    kernels = profile.by_kernel(seen, instructions, 2)
    assert [(k.name, k.part, k.us, k.launches) for k in kernels] == [
        ("gemm", "projections", 2.0, 1.0),
        ("_pack", "packing", 1.5, 0.5),
        ("MemcpyD2H", "experts", 0.5, 0.5),
        ("odd", profile.REST, 0.0, 0.5),
    ]


def test_time_of_control_flow_is_not_counted_twice():
    seen = [trace.Event("while.1", "while.1", 0, 5000), trace.Event("dot.1", "dot.1", 1000, 2000)]
    instructions = {
        "while.1": profile.Instruction("while", "experts"),
        "dot.1": profile.Instruction("dot", "experts"),
    }
    assert [k.name for k in profile.by_kernel(seen, instructions, 1)] == ["dot.1"]


def test_true_widths_need_a_gpu(monkeypatch):
    from typer.testing import CliRunner

    from jmla.bench.__main__ import app

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert "needs an NVIDIA GPU" in str(CliRunner().invoke(app, ["profile"]).exception)
    assert os.environ["XLA_FLAGS"] == profile.XLA_FLAGS
    for bad in (["--kind", "foo"], ["--context", "0"], ["--rows", "0"]):
        assert CliRunner().invoke(app, ["profile", *bad]).exit_code == 2
