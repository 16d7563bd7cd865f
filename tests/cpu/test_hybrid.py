"""Recurrent hybrids beyond what every family is checked for: the work that a conversation spares, other layouts of a
checkpoint, configs that can't be, and the recurrence itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.files.source import named_float
from quire.kernels.reference import recurrent as reference
from quire.layers.step import Step
from quire.models.loading.loader import build_model
from quire.models.registry import find_family
from quire.types import QuireError, SamplingParams
from tests.cpu.families.harness import all_families, ragged_prompts, relative_error, save_checkpoint
from tests.cpu.paged_harness import HarnessRow, PagedHarness
from tests.cpu.rig import CPU, load, make_engine, make_request, run

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "nemotron_h experts", "mamba2", "bamba",
           "granitemoehybrid", "falcon_h1", "lfm2", "lfm2_moe", "olmo_hybrid", "kimi_linear")  # fmt: skip
INTERVAL = 16  # of snapshots, where 1,024 tokens would take a test too long


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in all_families():
        if family.name in HYBRIDS:
            found[family.name] = tmp_path_factory.mktemp(family.name.replace(" ", "-"))
            save_checkpoint(family, found[family.name])
    assert set(found) == set(HYBRIDS)
    return found


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


# ---------------------------------------------------------------------------------------------------------------------
# What a conversation spares


def test_a_second_turn_computes_its_new_tokens_and_at_most_an_interval(folders: dict[str, Path]) -> None:
    """With the interval as it is: 1,024."""
    model = load(folders["qwen3_5_text"], page_tokens=16)
    assert [spec.snapshot_tokens for spec in model.specs if spec.kind == "state"] == [1024]
    knobs = {"page_tokens": 16, "max_len": 4096, "max_batch_tokens": 512, "num_pages": 400}
    engine = make_engine(model, **knobs)
    first = [(7 * i * i + 11) % 250 for i in range(1500)]
    (answer,) = run(engine, [first], greedy(40), check=False)
    new = [(5 * i + 3) % 250 for i in range(60)]
    before = engine.scheduler.stats.computed_tokens
    prompt = first + answer + new
    (second,) = run(engine, [prompt], greedy(8), check=False)
    computed = engine.scheduler.stats.computed_tokens - before
    assert computed <= len(new) + 1024 + len(second)
    assert computed == len(prompt) - 1488 + len(second) - 1, "it starts at the first prompt's last full page"
    assert run(make_engine(model, **knobs, prefix_cache=False), [prompt], greedy(8), check=False) == [second]


@pytest.mark.parametrize("preemption", ["none", "swap", "recompute"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_turn_costs_its_new_tokens_and_at_most_an_interval(
    name: str, preemption: str, folders: dict[str, Path]
) -> None:
    """Also where each turn is pushed out in the middle of its answer, which is longer than an interval: by swap nothing
    is computed twice, by recompute no more than another interval."""
    model: Any = load(folders[name])
    assert all(0 < spec.snapshot_tokens <= 1024 for spec in model.specs if spec.kind == "state")
    model.specs[:] = [replace(s, snapshot_tokens=INTERVAL) if s.kind == "state" else s for s in model.specs]
    knobs = {} if preemption == "none" else {"preemption": preemption}
    engine = make_engine(model, max_rows=1, order="priority", **knobs)
    stats, conversation = engine.scheduler.stats, []
    for turn, new in enumerate(ragged_prompts()[2:4]):
        conversation += new
        before = stats.computed_tokens
        request = make_request(f"turn-{turn}", conversation, greedy(35), priority=5)
        urgent = [make_request(f"urgent-{turn}", [turn + 3] * 9, greedy(4))] if preemption != "none" else []
        engine.add(request)
        while engine.has_work:
            if urgent and request.num_sampled >= 25:
                engine.add(urgent.pop())
            engine.turn()
        engine.scheduler.check()
        answer = request.tokens[len(conversation) :]
        computed = stats.computed_tokens - before - (0 if preemption == "none" else 9 + 4 - 1)
        assert computed <= len(new) + len(answer) + INTERVAL * (2 if preemption == "recompute" else 1)
        if turn == 0:
            assert (computed == len(new) + len(answer) - 1) == (preemption != "recompute")
        else:
            assert computed < len(conversation) + len(answer) - 1, "less than everything again"
        assert run(make_engine(model, prefix_cache=False), [conversation], greedy(35), check=False) == [answer]
        conversation += answer
    assert stats.preemptions == (0 if preemption == "none" else 2)
    assert (stats.swaps, stats.recomputes) == (2 * (preemption == "swap"), 2 * (preemption == "recompute"))


class Interrupted:
    """A model some of whose steps fail when all is computed: states have moved on, and nobody may build on them."""

    def __init__(self, model: Any, every: int):
        self._model, self._every, self.num_steps, self.num_failed = model, every, 0, 0

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        hidden = self._model.forward(step, caches)
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self.num_failed += 1
            raise RuntimeError("the device says no")
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "mamba2", "lfm2"])
def test_who_is_rolled_back_goes_on_from_the_right_state(name: str, depth: int, folders: dict[str, Path]) -> None:
    model: Any = load(folders[name])
    model.specs[:] = [replace(s, snapshot_tokens=INTERVAL) if s.kind == "state" else s for s in model.specs]
    prompts = ragged_prompts()[2:6]
    expected = run(make_engine(model, prefix_cache=False), prompts, greedy(30), check=False)
    faulty = Interrupted(model, every=7)
    engine = make_engine(faulty, depth=depth, late=depth == 2, chunk_tokens=7)
    assert run(engine, prompts, greedy(30)) == expected
    assert faulty.num_failed >= 5


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_experts_may_lie_in_one_tensor(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["qwen3_next"]
    tensors = load_file(source / "model.safetensors")
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = [[tensors.pop(f"{prefix}.{e}.{name}_proj.weight") for name in ("gate", "up", "down")] for e in range(4)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in parts])
        tensors[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in parts])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    prompts = ragged_prompts()[:3]
    assert run(make_engine(load(tmp_path)), prompts, greedy(8)) == run(make_engine(load(source)), prompts, greedy(8))


def test_a_convolution_may_lie_in_three_tensors(folders: dict[str, Path], tmp_path: Path) -> None:
    """OLMo Hybrid: as it is published, with names of its own for some norms; as transformers saves it, which cuts
    elsewhere and has one of these names too often; and as transformers calls all of it."""
    saved = load_file(folders["olmo_hybrid"] / "model.safetensors")
    parts = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    assert [len(saved[name]) for name in parts] == [27, 27, 26]
    assert "model.layers.1.feedforward_layer_norm.weight" in saved
    published, plain = {}, {}
    for name, tensor in saved.items():
        if "layers.1." in name:
            name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        published[name] = tensor
        name = name.replace("attention_layer_norm", "input_layernorm")
        plain[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = tensor
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.linear_attn"
        names = [f"{prefix}.{part}_conv1d.weight" for part in "qkv"]
        joined = torch.cat([plain.pop(name) for name in names])
        published |= dict(zip(names, (part.clone() for part in joined.split((16, 16, 48))), strict=True))
        plain[f"{prefix}.conv1d.weight"] = joined
    expected = run(make_engine(load(folders["olmo_hybrid"])), ragged_prompts()[:3], greedy(8))
    for number, tensors in enumerate((published, plain)):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text((folders["olmo_hybrid"] / "config.json").read_text())
        assert run(make_engine(load(folder)), ragged_prompts()[:3], greedy(8)) == expected
    del published[parts[1]]
    save_file(published, folder / "model.safetensors")
    with pytest.raises(QuireError, match=r"lacks tensor model\.layers\.0\.linear_attn\.k_conv1d\.weight"):
        load(folder)


@pytest.mark.parametrize(("given", "turns"), [
    ({"rope_theta": None, "rope_parameters": None}, False), ({"rope_theta": None}, False), ({}, True),
    ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False), ({"rope_theta": 5000.0}, True),
    ({"rope_parameters": None}, True), ({"rope_theta": None, "rope_parameters": {"rope_theta": 5000.0}}, True),
], ids=str)  # fmt: skip
def test_a_theta_of_null_is_no_rope(given: dict[str, Any], turns: bool, folders: dict[str, Path]) -> None:
    """OLMo Hybrid's are published without, and say so in several ways; transformers takes them for the same."""
    config = json.loads((folders["olmo_hybrid"] / "config.json").read_text(), object_hook=named_float)
    del config["rope_parameters"]
    rope = find_family("olmo_hybrid").read_config({**config, **given}).rope
    theirs = transformers.OlmoHybridConfig.from_dict({**config, **given}).rope_parameters["rope_theta"]
    assert (rope.kind != "none") == turns and (rope.theta == theirs if turns else theirs is None)


def test_kimi_linear_may_be_as_it_is_published(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers saves a layer without experts under the others' name, and says in fields of its own what published
    configs say in one object, counting layers from 1."""
    tensors = load_file(folders["kimi_linear"] / "model.safetensors")
    dense = "model.layers.0.block_sparse_moe."
    assert f"{dense}gate_proj.weight" in tensors and tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 3, 1)
    published = {name.replace(dense, "model.layers.0.mlp."): tensor for name, tensor in tensors.items()}
    config = json.loads((folders["kimi_linear"] / "config.json").read_text(), object_hook=named_float)
    linear = {
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
    }
    for key in ("layer_types", "mlp_layer_types"):
        del config[key]
    config |= {"linear_attn_config": linear, "first_k_dense_replace": 1, "mla_use_nope": True, "moe_layer_freq": 1,
               "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0}  # fmt: skip
    save_file(published, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = ragged_prompts()[:3]
    expected = run(make_engine(load(folders["kimi_linear"])), prompts, greedy(8))
    assert run(make_engine(load(tmp_path)), prompts, greedy(8)) == expected


def test_kimi_linear_has_the_sizes_of_transformers() -> None:
    """Where config.json leaves them out, or says them by names that either knows."""
    given = {"model_type": "kimi_linear", "vocab_size": 100, "hidden_size": 64, "model_max_length": 300,
             "num_experts": 16, "num_experts_per_token": 3}  # fmt: skip
    ours, theirs = find_family("kimi_linear").read_config(given), transformers.KimiLinearConfig(**given)
    attention, recurrent, routing = ours.shape.attention, ours.shape.recurrent, ours.moe.routing
    kinds = ["full_attention" if kind == "attention" else "linear_attention" for kind in ours.shape.blocks[::2]]
    assert kinds == theirs.layer_types and ours.shape.max_positions == theirs.max_position_embeddings == 300
    assert (attention.num_heads, attention.rank, attention.q_rank) == (32, theirs.kv_lora_rank, theirs.q_lora_rank)
    assert attention.head_dim == theirs.qk_head_dim and attention.value_dim == theirs.v_head_dim
    assert (recurrent.num_heads, recurrent.key_dim) == (theirs.linear_num_heads, theirs.linear_head_dim)
    assert (routing.num_experts, routing.top_k) == (16, 3) and routing.scale == theirs.routed_scaling_factor
    assert (ours.moe.inner_width, ours.moe.shared_width) == (theirs.moe_intermediate_size,) * 2
    assert ours.sparse_layers == {layer for layer, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"}
    assert ours.shape.norm_eps == theirs.rms_norm_eps and ours.inner_width == theirs.intermediate_size


# ---------------------------------------------------------------------------------------------------------------------
# Configs that can't be


BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"layer_types": ["linear_attention", "sparse_attention", "full_attention"]}, "'sparse_attention'"),
    ("qwen3_next", {"layer_types": ["linear_attention"]}, "has 1 entries"),
    ("qwen3_next", {"linear_num_value_heads": 5}, "5 recurrent heads"),
    ("qwen3_next", {"num_key_value_heads": 3}, "4 heads of size 16 with 3"),
    ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "24 of the 16 elements"),
    ("qwen3_next", {"rope_parameters": {"rope_type": "spiral"}}, "'spiral'"),
    ("qwen3_next", {"hidden_act": "mish"}, "'mish'"),
    ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim=0"),
    ("olmo_hybrid", {"layer_types": ["linear_attention", "sliding_attention"]}, "'sliding_attention'"),
    ("olmo_hybrid", {"layer_types": ["linear_attention"]}, "has 1 entries"),
    ("olmo_hybrid", {"linear_num_value_heads": 1}, "1 recurrent heads can't be divided among 2 groups"),
    ("olmo_hybrid", {"linear_allow_neg_eigval": 2.0}, "linear_allow_neg_eigval=2.0 must be true or false"),
    ("olmo_hybrid", {"linear_value_head_dim": -12}, "linear_value_head_dim=-12"),
    ("olmo_hybrid", {"hidden_act": "gelu"}, "'gelu'"),
    ("kimi_linear", {"layer_types": ["linear_attention", "sliding_attention"]}, "'sliding_attention'"),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
        "must name each of the layers 1 to 3 once",
    ),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 4], "full_attn_layers": [2]}},
        "kda_layers of linear_attn_config=[1, 4]",
    ),
    ("kimi_linear", {"linear_attn_config": [1]}, "linear_attn_config=[1] must be an object"),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 0}}, "linear_head_dim=0"),
    ("kimi_linear", {"linear_num_heads": -2}, "linear_num_heads=-2"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "'softmax'"),
    ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("kimi_linear", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
    ("kimi_linear", {"kv_lora_rank": "small"}, "kv_lora_rank='small'"),
    ("kimi_linear", {"attention_bias": True}, "attention_bias and without q_lora_rank"),
    ("kimi_linear", {"num_expert_group": 3}, "can't be divided into 3 groups"),
    ("kimi_linear", {"hidden_act": "gelu"}, "'gelu'"),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "convolution"]}, "'convolution'"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-X*"}, "'X'"),
    ("nemotron_h", {"layers_block_type": ["mlp", "moe"]}, "No layer of this model attends or keeps a state"),
    ("nemotron_h", {"mlp_hidden_act": "mish"}, "'mish'"),
    ("nemotron_h", {"n_groups": 3}, "8 recurrent heads"),
    ("mamba2", {"expand": 3}, "do not add up to 192"),
    ("mamba2", {"time_step_limit": [0.1]}, "time_step_limit"),
    ("bamba", {"mamba_d_head": 24}, "do not add up to 128"),
    ("falcon_h1", {"mamba_d_ssm": 90}, "do not add up to 90"),
    ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers=[1.0, 2.0] must be 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": "1, 2"}, "mlp_multipliers"),
    ("falcon_h1", {"layers_block_type": ["hybrid", "attention"]}, "'attention'"),
    ("falcon_h1", {"key_multiplier": "half"}, "key_multiplier='half'"),
    (
        "lfm2",
        {"layer_types": None, "full_attn_idxs": [3]},
        "full_attn_idxs=[3] must be a list of layer indices below 3",
    ),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 1}, "full_attn_idxs=1"),
    ("lfm2", {"layer_types": ["conv", "short_conv", "conv"]}, "'short_conv'"),
    ("lfm2", {"conv_L_cache": 0}, "conv_L_cache=0"),
    ("lfm2", {"block_multiple_of": -16}, "block_multiple_of=-16"),
    ("lfm2", {"block_ffn_dim_multiplier": "2"}, "block_ffn_dim_multiplier='2'"),
    ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers=-1"),
    ("lfm2_moe", {"num_experts_per_tok": 9}, "can't choose 9 experts per token from 8"),
]


@pytest.mark.parametrize(("name", "changes", "said"), BAD_CONFIGS, ids=lambda value: str(value)[:40])
def test_a_config_that_can_not_be_is_named(
    name: str, changes: dict[str, Any], said: str, folders: dict[str, Path]
) -> None:
    config = {**json.loads((folders[name] / "config.json").read_text(), object_hook=named_float), **changes}
    with pytest.raises(QuireError) as caught:
        build_model(config, dtype="float32", device=CPU, page_tokens=16)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.code in ("bad_config", "unsupported_model")


def test_a_missing_tensor_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["nemotron_h"] / "model.safetensors")
    del tensors["backbone.layers.0.mixer.A_log"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["nemotron_h"] / "config.json").read_text())
    with pytest.raises(QuireError, match=r"lacks tensor backbone\.layers\.0\.mixer\.A_log"):
        load(tmp_path)


def test_the_letters_of_a_pattern_mean_the_same(folders: dict[str, Path]) -> None:
    config = json.loads((folders["nemotron_h"] / "config.json").read_text(), object_hook=named_float)
    letters = {**config, "layers_block_type": None, "hybrid_override_pattern": "M-*M"}
    family = find_family("nemotron_h")
    assert family.read_config(letters) == family.read_config(config)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.6)], ids=str)
def test_steps_are_bounded_as_the_config_says(limits: tuple[float, float], tmp_path: Path) -> None:
    """Nemotron-H's steps, some of them shorter than those its weights are drawn for: those are no limit."""
    family = next(family for family in all_families() if family.name == "nemotron_h")

    def config() -> Any:
        made = family.config()
        made.time_step_limit = limits
        return made

    def draw(name: str, parameter: Tensor, generator: torch.Generator) -> None:
        family.draw(name, parameter, generator)
        if name.endswith("dt_bias"):
            parameter.copy_(torch.linspace(-12.0, 1.0, len(parameter)))  # softplus: 6e-6 to 1.3

    oracle = save_checkpoint(replace(family, config=config, draw=draw), tmp_path)
    mixers = [module for module in oracle.modules() if hasattr(module, "time_step_limit")]
    for mixer in mixers:  # it has a limit of its own there, see nemotron_h.py
        mixer.time_step_limit = limits
    tokens = [(7 * i * i + 3) % 256 for i in range(50)]
    row, harness = HarnessRow(list(tokens)), PagedHarness(load(tmp_path), num_pages=40, seed=2)
    got = torch.cat([harness.step([(row, count)]) for count in (20, 1, 1, 7, 21)])
    with torch.inference_mode():
        want = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    assert len(mixers) == 2 and (got - want).abs().max() <= 1e-4 * want.abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# The recurrence itself


def test_large_states_are_moved_on_where_they_lie(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = load(folders["qwen3_next"]), ragged_prompts()[:4]
    expected = run(make_engine(model), prompts, greedy(12))
    monkeypatch.setattr(reference, "LARGE_STATE", 0)
    assert run(make_engine(model, chunk_tokens=7), prompts, greedy(12)) == expected


@pytest.mark.parametrize(("beta_top", "num_decays", "fastest"), [
    (1.0, 1, 0.2), (2.0, 1, 0.2), (None, 1, 0.2), (1.0, 8, 0.2), (2.0, 8, 0.2), (None, 8, 0.2), (1.0, 8, 300.0),
])  # fmt: skip
def test_chunks_equal_the_recurrence_token_by_token(beta_top: float | None, num_decays: int, fastest: float) -> None:
    """Also where all keys are the same, which is the worst case for the delta rule's triangular system, and where
    some channels decay so fast that what is left of them can't be divided by."""
    torch.manual_seed(3)
    for num_tokens, same_keys in ((1, False), (31, False), (77, False), (77, True)):
        keys = torch.randn(num_tokens, 2, 8, dtype=torch.float64)
        keys = keys[:1].expand_as(keys) if same_keys else keys
        inputs = reference.RecurrentInputs(
            q=torch.randn(num_tokens, 2, 8, dtype=torch.float64),
            k=torch.nn.functional.normalize(keys, dim=-1),
            v=torch.randn(num_tokens, 4, 6, dtype=torch.float64),
            decay=-torch.rand(num_tokens, 4, num_decays, dtype=torch.float64).pow(8 if fastest > 1 else 1) * fastest,
            beta=None if beta_top is None else beta_top * torch.rand(num_tokens, 4, dtype=torch.float64),
        )
        state = torch.randn(4, 6, 8, dtype=torch.float64)
        out, after = reference.chunk_scan(inputs.expanded(slice(None)), state)
        exact_out, exact_after = reference.exact_scan(inputs, state)
        torch.testing.assert_close(out, exact_out)
        torch.testing.assert_close(after, exact_after)
        narrow = [None if part is None else part.float() for part in (inputs.q, inputs.k, inputs.v, inputs.decay)]
        beta = None if inputs.beta is None else inputs.beta.float()
        out, after = reference.chunk_scan(reference.RecurrentInputs(*narrow, beta).expanded(slice(None)), state.float())
        assert max(relative_error(out, exact_out), relative_error(after, exact_after)) < 1e-4
