"""kernels/ compiled without a GPU for every target, at vocabularies of training, and what the compiler makes of them.

As a script, `python tests/kernels/test_aot.py FOLDER TARGET ...`, this file compiles its variants into FOLDER. Tests
start it once for sm_90 and once for the other targets, because a process of tests makes kernels for the interpreter.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# Bytes of shared memory that a program may have (CUDA's and AMD's guides): others do not launch.
SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
SPILLED = ("STACK", "LOCAL", "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")


def rows(name, dtype=None, **constants):
    """A kernel whose programs own rows. Its sizes are given as `VOCABULARY`'s: Triton's compiler is told which of them
    16 divides, as it is at a launch, and where that is not the row's length it makes loads of 4 bytes."""
    from kernels import row_kernels

    options = row_kernels.launch_options(VOCABULARY["row_stride"])
    kernel = getattr(row_kernels, name)
    types = {"num_rows": "i32", "vocab": "i32", "row_stride": "i32", "scale": "fp32", "inverse_cap": "fp32"}
    types |= {"target_ptr": "*i64", "dlogits_ptr": f"*{dtype}", "BLOCK": options.pop("BLOCK")} | constants
    values = {argument: types.get(argument, "*fp32") for argument in kernel.arg_names}
    return kernel, values, options


def dlogits(dtype, entropy, capped=False):
    return rows("dlogits_kernel", dtype, ENTROPY=entropy, CAPPED=capped)


# Tokenizers of Qwen2.5 and Qwen3, of models with 151,936 columns; a model whose own columns are odd.
VOCABULARIES = [(151665, 151936), (151669, 151936), (50257, 50272)]
VOCABULARY = dict(zip(("vocab", "row_stride"), VOCABULARIES[0], strict=True))
EVERYWHERE = {  # compiled for every target; the others for sm_90
    "dlogits bf16": partial(dlogits, "bf16", False),
    "row stats": partial(rows, "row_stats_kernel"),
}
ROWS = {
    "dlogits bf16": EVERYWHERE["dlogits bf16"],
    "dlogits bf16 entropy": partial(dlogits, "bf16", True),
    "dlogits fp32 entropy": partial(dlogits, "fp32", True),
    "dlogits bf16 entropy capped": partial(dlogits, "bf16", True, True),
}
VARIANTS = ROWS | {"row stats": EVERYWHERE["row stats"]}
ELSEWHERE = [(variant, target) for variant in EVERYWHERE for target in sorted(TARGETS.keys() - {"sm_90"})]
PAIRS = [(variant, "sm_90") for variant in VARIANTS] + ELSEWHERE


def compile_all(folder, targets):
    """Writes `variant.target.{ttir,ptx,json}`; json: resources of the binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for variant, launch in VARIANTS.items():
        kernel, values, options = launch()
        assert sorted(values) == sorted(kernel.arg_names), (variant, kernel.arg_names)
        # In the order of the kernel's arguments: another order compiles, to an empty kernel.
        signature = {name: v if isinstance(v := values[name], str) else "constexpr" for name in kernel.arg_names}
        constants = {(i,): values[name] for i, name in enumerate(kernel.arg_names) if signature[name] == "constexpr"}
        sizes = {"width": 2048} | VOCABULARY  # numbers of rows are not specialised
        divided = [t[0] == "*" or (t == "i32" and sizes.get(name, 1) % 16 == 0) for name, t in signature.items()]
        aligned = {(i,): [["tt.divisibility", 16]] for i, is_divided in enumerate(divided) if is_divided}
        for target in {target for pair, target in PAIRS if pair == variant}.intersection(targets):
            source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
            done = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
            found = {"shared": done.metadata.shared, "bytes": len(done.kernel)}
            path = folder / f"{variant}.{target}"
            if target == "gfx942":
                assembly = done.asm["amdgcn"]
                found |= {name: int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in SPILLED[2:]}
            else:
                binary = Path(f"{path}.cubin")
                binary.write_bytes(done.asm["cubin"])
                command = [cuobjdump, "-res-usage", binary]
                usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                found |= {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
                Path(f"{path}.ptx").write_text(done.asm["ptx"])
            Path(f"{path}.ttir").write_text(done.asm["ttir"])
            Path(f"{path}.json").write_text(json.dumps(found))


def compiled(folder, targets):
    """read(variant, suffix, target="sm_90") of what was compiled."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, __file__, folder, *targets], env=env, check=True)

    def read(variant, suffix, target="sm_90"):
        text = (folder / f"{variant}.{target}.{suffix}").read_text()
        return json.loads(text) if suffix == "json" else text

    return read


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("aot"), ["sm_90"])


@pytest.fixture(scope="module")
def built_elsewhere(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("aot"), TARGETS.keys() - {"sm_90"})


@pytest.mark.long
@pytest.mark.parametrize(("variant", "target"), ELSEWHERE)
def test_builds_for_other_targets(built_elsewhere, variant, target):
    found = built_elsewhere(variant, "json", target)
    assert found["shared"] <= SHARED[target] * 1024, found
    assert found["bytes"] > 1000 and "tt.store" in built_elsewhere(variant, "ttir", target)
    assert not any(found.get(name) for name in SPILLED), found


def test_vocabularies_are_one_kernel():
    """Of a vocabulary the compiler knows only whether 16 divides it: what holds for the first holds for all."""
    assert {(vocab % 16 == 0, row_stride % 16 == 0) for vocab, row_stride in VOCABULARIES} == {(False, True)}
    assert all(vocab > 8192 for vocab, _ in VOCABULARIES)  # with the same block


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_spills_on_hopper(built, variant):
    found = built(variant, "json")
    print(f"{variant}: {found['REG']} registers, {found['shared']} bytes shared")
    assert not any(found.get(name) for name in SPILLED) and found["shared"] <= SHARED["sm_90"] * 1024, found
    assert "st.global" in built(variant, "ptx") and found["REG"] > 20 and found["bytes"] > 1000, found


@pytest.mark.parametrize("variant", ROWS)
def test_blocks_are_read_before_they_are_overwritten(built, variant):
    """In the loop that writes dz over the logits: all loads, a barrier of the whole program, all stores."""
    loops = re.split(r"^\$L__BB", built(variant, "ptx"), flags=re.M)
    order = [re.findall(r"ld\.global\.v4|bar\.sync|st\.global\.v4", loop) for loop in loops]
    (write,) = [found for found in order if "st.global.v4" in found]
    *loads, barrier = write[: write.index("st.global.v4")]
    assert barrier == "bar.sync" and loads == ["ld.global.v4"] * 4, write
    assert set(write[len(loads) + 1 :]) == {"st.global.v4"}, write
    if "bf16" in variant:
        assert "cvt.rn.bf16x2.f32" in built(variant, "ptx")  # to nearest, two at a time


@pytest.mark.parametrize("variant", VARIANTS)
def test_offsets_of_rows_are_64_bit(built, variant):
    """row * V passes 2^31 at 14,135 rows of 151,936: of what moves a pointer, every product of two sizes is 64 bits."""
    ttir = built(variant, "ttir")
    defined = dict(re.findall(r"^\s*(%\w+) = (.*)", ttir, re.M))
    moved_by, products = re.findall(r"tt\.addptr %\w+, (%\w+)", ttir), set()
    while moved_by:
        operation = defined.get(moved_by.pop(), "").split(" loc(")[0]
        moved_by += re.findall(r"%\w+", operation)
        if re.match(r"arith\.muli %(?!c)\w+, %(?!c)\w+ :", operation):  # constants are called %c16_i32 or %cst
            products.add(operation)
    assert products and all(operation.endswith(": i64") for operation in products), products


if __name__ == "__main__":
    compile_all(Path(sys.argv[1]), sys.argv[2:])
