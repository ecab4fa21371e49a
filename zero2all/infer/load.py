"""Loads a model: a run of a workspace, or a Hugging Face folder.

Only the weights are read, not the optimizer. They are checked in the same pass, and each is converted to the dtype and
device asked for as it comes from the disk, so that nothing is held twice.
"""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.memory import available_memory
from zero2all.common.peers import Peers
from zero2all.common.workspace import STAMP_NAME, Workspace, is_folder_name, open_workspace, refuse_workspace
from zero2all.config import RunConfig
from zero2all.config.training import OptimConfig, model_at
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.model.hf import DTYPES, nonfinite, open_hf_folder
from zero2all.model.init import without_weights
from zero2all.model.lora import initial_adapters, merge
from zero2all.model.moe import routers
from zero2all.model.rope import rope_tables
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import resolve
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.device import pick_device
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import held_table, init_weights, layout_table, model_parts, router_biases
from zero2all.parallel.pipeline import keep_stages, make_stages, model_costs
from zero2all.parallel.pipeline import problems as pipeline_problems
from zero2all.parallel.shards import part_of
from zero2all.parallel.tensor import cut_model
from zero2all.parallel.tensor import problems as tensor_problems
from zero2all.parallel.world import World
from zero2all.tokenizer.load import Tokenizer, load_tokenizer
from zero2all.train.checkpoints.find import find_newest, newest_checkpoint, open_at
from zero2all.train.checkpoints.layout import INDEX_NAME, STATE_NAME, checkpoint_folder, require_checkpoint
from zero2all.train.checkpoints.load import Checkpoint, check_bytes, read_checkpoint
from zero2all.train.checkpoints.manifest import Step, chosen_step
from zero2all.train.saved_config import CONFIG_FILE, load_run_config, with_vocabulary

READY_OPS = OpsConfig(
    attention="sdpa", swiglu="triton", linear="plain", embedding="torch", linear_cross_entropy="triton", strict=False
)
"""Operators that are not tried out before they are chosen, which takes seconds; without Triton, torch's."""


@dataclass(frozen=True)
class LoadedModel:
    """What evaluation and generation need."""

    name: str
    step: int
    model: Z2all
    tokenizer: Tokenizer
    config: RunConfig | None = None
    """That of the run; None for a Hugging Face folder."""
    stored_dtype: str = "float32"
    """What an imported model was stored in; training keeps float32."""
    tokens: int = 0
    """Tokens it was trained on; 0 where that is not known."""
    folder: Path | None = None
    """Where it came from: the folder of the run, or the Hugging Face folder; None: it was made here."""
    world: World | None = None
    """The ranks that it is spread over (`spread`); None: it is whole."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    @property
    def window(self) -> int:
        """Tokens that it saw at once in training; for a Hugging Face folder, those it was made for."""
        longest = self.model.config.max_seq_len
        return longest if self.config is None else min(longest, self.config.data.seq_len)

    @property
    def parameters(self) -> int:
        """How many parameters it has, also when the engine has rounded them to 8 bits."""
        return parameter_counts(self.model.config)["total"]

    def weights(self) -> dict[str, Tensor]:
        """The weights by logical name, as a checkpoint has them; live."""
        return {name: part.values for name, part in model_parts(self.model).items()}


def load_run(workspace: Workspace, name: str, step: Step = None) -> LoadedModel:
    """The newest checkpoint of a run, or the one of `step`, as evaluation and export take it: in float32, where the run
    trains."""
    run = workspace.run(name)
    return _run_weights(run, step, pick_device(load_run_config(run).parallel.device), torch.float32)


def load_model(
    source: str,
    workspace: Workspace | None = None,
    step: Step = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    world: World | None = None,
) -> LoadedModel:
    """The model of a run (its name in `workspace`, or the path of its folder) or of a Hugging Face folder; with `world`
    what this rank has of it.

    `device` None takes a GPU where there is one; `dtype` None is bfloat16 there and float32 on the CPU. Of a run only
    the weights are read; a newer checkpoint whose weights are damaged is left out, and said so.
    """
    place = (
        device if isinstance(device, torch.device) else pick_device("auto" if device is None else device, "--device")
    )
    kind = _dtype(dtype, place)
    folder = Path(source).expanduser()
    if workspace is not None and is_folder_name(source) and workspace.run(source).is_dir():
        folder = workspace.run(source)
    try:
        if (folder / CONFIG_FILE).is_file():
            return _run_weights(folder, step, place, kind) if world is None else _part(folder, step, kind, world)
        if (folder / "config.json").is_file():
            if world is not None:
                raise UsageError(f"{folder} is a Hugging Face folder. To spread it over ranks, import it: z2a import.")
            return _hf_weights(folder, step, place, kind)
    except FileNotFoundError as error:
        raise BadInputError(
            f"{error.filename} disappeared while {folder} was being read. Restore it, or download the folder again."
        ) from error
    refuse_workspace(folder)
    if folder.is_dir():
        raise BadInputError(
            f"{folder} is neither the folder of a run (it has no {CONFIG_FILE}) nor a Hugging Face folder (it has no "
            f"config.json). Give the name of a run, or one of these folders."
        )
    if workspace is None or not is_folder_name(source) or not (workspace.root / STAMP_NAME).is_file():
        raise BadInputError(
            f"There is no folder {folder.absolute()}. Give the folder of a run or of a Hugging Face model; or the name "
            f"of a run, and its workspace with --work."
        )
    open_workspace(workspace.root).existing_run(source)  # says which runs there are
    raise AssertionError("the run was not there a moment ago")


def untrained(workspace: Workspace, config: RunConfig) -> LoadedModel:
    """The model of `config` as training would start it: the baseline of every comparison."""
    tokenizer = load_tokenizer(workspace.tokenizer)
    config = with_vocabulary(config, tokenizer.vocab_size)
    model = _model_of_run(config)
    init_weights(model, config.train.seed)
    return LoadedModel(f"{config.train.name} (untrained)", 0, model, tokenizer, config)


def empty_model(
    config: ModelConfig, ops: OpsConfig, device: torch.device, dtype: torch.dtype, mesh: Mesh | None = None
) -> Z2all:
    """A model whose weights are still to be written: no time is spent on drawing them. With `mesh` only what this rank
    has of it."""
    context = OpContext(device.type, dtype, hidden_size=config.hidden_size)
    with without_weights():
        model = Z2all(config, resolve(ops, context))
        if mesh is not None and mesh.tensor.size > 1:
            cut_model(model, mesh.tensor)
        if mesh is not None and mesh.pipeline.size > 1:
            stages = make_stages(model_costs(config, config.max_seq_len), mesh.pipeline.size)
            keep_stages(model, [stages[mesh.pipeline.rank]])
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = rope_tables(config, config.max_seq_len, device)
    model.cos, model.sin = cos.to(wide), sin.to(wide)
    for _, router in routers(model):
        router.clear(device)
    return model.eval()


def _model_of_run(config: RunConfig) -> Z2all:
    ops = dataclasses.replace(config.ops, strict=False, compile="none")  # what trained need not be what judges
    return empty_model(config.model, ops, pick_device(config.parallel.device), torch.float32)


def _at(checkpoint: Checkpoint, config: RunConfig) -> RunConfig:
    """The config with the model as it was at this checkpoint."""
    return dataclasses.replace(config, model=model_at(checkpoint.step, config.model, config.stages))


def _run_weights(run: Path, step: Step, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    run = run.resolve()
    workspace, config = open_workspace(run.parent.parent), load_run_config(run)
    step = chosen_step(run, step)
    filled: dict[int, Z2all] = {}

    def opened(folder: Path, _: Peers) -> Checkpoint:
        checkpoint = read_checkpoint(folder)
        check_bytes(checkpoint, (INDEX_NAME, STATE_NAME))
        filled.clear()  # a damaged one is given up before memory is taken for the next
        _require_room(run.name, _at(checkpoint, config), device, dtype)
        lora = config.finetune.lora
        wide = torch.float32 if lora.rank else dtype  # W + scale B A is rounded once
        model = empty_model(_at(checkpoint, config).model, READY_OPS, device, wide)
        weights = {name: part.values for name, part in model_parts(model).items()}
        adapters = {name: values.to(device) for name, values in initial_adapters(model.config, lora, 0).items()}
        stored = {f"{checkpoint.model_group}/{name}": values for name, values in (weights | adapters).items()}
        checkpoint.load_checked(stored)
        merge(weights, adapters, model.config, lora)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        filled[checkpoint.step] = model
        return checkpoint

    with ThreadPoolExecutor(1) as beside:
        tokenizer = beside.submit(_ready_tokenizer, workspace.tokenizer)
        checkpoint = newest_checkpoint(run, opened=opened) if step is None else None
        if checkpoint is None:
            require_checkpoint(run, step)
            assert step is not None, "a run with checkpoints has a newest one"
            checkpoint = opened(checkpoint_folder(run, step), Peers())
        model = filled.pop(checkpoint.step)
        _refuse_nonfinite(model, f"the run {run.name} at step {checkpoint.step}", "Choose another one with --step.")
        return _loaded_run(run, checkpoint, _at(checkpoint, config), model, tokenizer.result())


def stage_without_values(config: ModelConfig, dtype: torch.dtype, sizes: MeshSizes, stage: int) -> Z2all:
    """What a rank of a pipeline stage has of a model, for estimates: its tensor ranks have equally many values."""
    mesh = Mesh(sizes, stage * sizes.tensor)
    return empty_model(config, READY_OPS, torch.device("meta"), dtype, mesh)


def _most_weights(config: ModelConfig, dtype: torch.dtype, sizes: MeshSizes) -> int:
    """Bytes of the weights of the rank that has most."""
    stages = [stage_without_values(config, dtype, sizes, stage) for stage in range(sizes.pipeline)]
    return max(sum(each.nbytes for each in stage.parameters()) for stage in stages)


def _require_room(
    name: str, config: RunConfig, device: torch.device, dtype: torch.dtype, world: World | None = None
) -> None:
    """UsageError where the weights do not fit, with a layout in which they do."""
    needed = parameter_counts(config.model)["total"] * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if world is not None:
        needed, free = _most_weights(config.model, dtype, world.mesh.sizes), min(world.gather(free))
    if needed <= free:
        return
    remedy = "Use a larger machine."
    for pipeline, tensor in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)):
        asked = MeshSizes(pipeline=pipeline, tensor=tensor)
        if not _layout_problems(config, asked) and _most_weights(config.model, dtype, asked) < 0.9 * free:
            words = " ".join(
                f"--parallel.{axis} {n}" for axis, n in (("tensor", tensor), ("pipeline", pipeline)) if n > 1
            )
            remedy = f"Spread it over {pipeline * tensor} GPUs: {words}."
            break
    raise UsageError(
        f"{name} needs {needed / 1e6:,.1f} MB for its weights; {device} has {free / 1e6:,.1f} MB. {remedy}"
    )


def _layout_problems(config: RunConfig, sizes: MeshSizes) -> list[str]:
    """Why a model cannot be spread so for inference."""
    parallel = ParallelConfig(tensor=sizes.tensor, pipeline=sizes.pipeline, copy_kv_heads=True)
    asked = dataclasses.replace(config, parallel=parallel, ops=OpsConfig(), optim=OptimConfig())
    return [*tensor_problems(asked, sizes), *pipeline_problems(asked, sizes)]


def _part(run: Path, step: Step, dtype: torch.dtype, world: World) -> LoadedModel:
    """What a rank has of the model of a run, from a checkpoint of any layout."""
    run = run.resolve()
    config, mesh = load_run_config(run), world.mesh
    if config.finetune.lora.rank:
        raise UsageError(f"{run.name} has adapters, which are merged on one device only: z2a export, then z2a import.")
    for problem in _layout_problems(config, mesh.sizes):
        raise UsageError(problem)
    at: int | None = world.gather(chosen_step(run, step))[0]
    checkpoint = find_newest(run, world, None) if at is None else open_at(run, at, world)
    if checkpoint is None:
        require_checkpoint(run, None)
        raise AssertionError("it has none")
    config = _at(checkpoint, config)
    _require_room(run.name, config, world.device, dtype, world)
    model = empty_model(config.model, READY_OPS, world.device, dtype, mesh)
    holders = dict(model.named_parameters())
    parts = {
        one.name: part_of(holders[one.holder], one) for one in held_table(layout_table(config.model), holders, mesh)
    }
    parts |= router_biases(model)
    checkpoint.load_into({f"{checkpoint.model_group}/{name}": part for name, part in parts.items()}, any_dtype=True)
    _refuse_nonfinite(model, f"the run {run.name} at step {checkpoint.step}", "Choose another one with --step.")
    tokenizer = _ready_tokenizer(open_workspace(run.parent.parent).tokenizer)
    return dataclasses.replace(_loaded_run(run, checkpoint, config, model, tokenizer), world=world)


def _ready_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer with the table of its pieces, which the first token needs; made while the weights are read."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.text_pieces, "a vocabulary has pieces"
    return tokenizer


def _loaded_run(
    run: Path, checkpoint: Checkpoint, config: RunConfig, model: Z2all, tokenizer: Tokenizer
) -> LoadedModel:
    stored_dtype = checkpoint.manifest.get("imported_dtype", "float32")
    if tokenizer.fingerprint != checkpoint.manifest.get("tokenizer"):
        raise BadInputError(
            f"The run {run.name} was trained with another tokenizer than the one of its workspace: the same ids mean "
            f"other text there. Put that tokenizer back, or pack with this one and train a new run."
        )
    tokens = int(checkpoint.record.get("tokens", 0))
    return LoadedModel(run.name, checkpoint.step, model, tokenizer, config, stored_dtype, tokens, run)


def _hf_weights(folder: Path, step: Step, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    if step is not None:
        raise UsageError(f"{folder} is a Hugging Face folder: it has no step {step}. Leave --step out.")
    opened = open_hf_folder(folder)
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(_ready_tokenizer, folder)
        model = empty_model(opened.config, READY_OPS, device, dtype)
        opened.fill({name: part.values for name, part in model_parts(model).items()})
        _refuse_nonfinite(model, str(folder), "Fetch it again.")
        tokenizer = coming.result()
    if tokenizer.vocab_size > opened.config.vocab_ids:
        raise BadInputError(
            f"The tokenizer in {folder} has {tokenizer.vocab_size} ids, its model only {opened.config.vocab_ids} rows: "
            f"the folder does not fit together. Fetch it again."
        )
    name = folder.resolve().name
    return LoadedModel(name, 0, model, tokenizer, None, opened.dtype, 0, folder)


def _dtype(asked: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if asked is None:
        is_narrow = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if is_narrow else torch.float32
    name = str(asked).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"A model cannot be run in {name!r}. Expected: {', '.join(DTYPES)}.")
    return DTYPES[name]


def _refuse_nonfinite(model: Z2all, origin: str, remedy: str) -> None:
    """A single NaN makes every output NaN."""
    broken = {name: count for name, tensor in model.named_parameters() if (count := nonfinite(tensor))}
    if broken:
        dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
        first = next(iter(broken))
        narrow = " Or load it in bfloat16 or float32, which hold larger values." if dtype == "float16" else ""
        raise BadInputError(
            f"{sum(broken.values()):,} weights of {origin} are NaN or infinite in {dtype} ({first}: "
            f"{broken[first]:,}). {remedy}{narrow}"
        )
