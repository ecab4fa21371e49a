"""A model over several real ranks writes and scores what one process does, and each rank has its part of the cache."""

import json

import pytest
import torch

from tests.ports import free_port
from zero2all.common.errors import UsageError
from zero2all.evals.options import EvalOptions
from zero2all.evals.report import judge_checkpoint
from zero2all.infer import load
from zero2all.infer.batch import results_of, tasks_of
from zero2all.infer.load import load_model
from zero2all.infer.prompts import Prompt
from zero2all.infer.sampling import Sampling
from zero2all.infer.service import Service
from zero2all.infer.text import TextRequest

RANK = """
import json, os, sys
job = json.loads(sys.argv.pop(1))
os.environ.update(job["environment"])
from zero2all.infer import spread
made = spread.SpreadEngine.make_forward
def noted(engine, weights):
    print(json.dumps({"cache": list(engine.blocks.keys.shape), "rank": job["rank"]}), file=sys.stderr, flush=True)
    return made(engine, weights)
spread.SpreadEngine.make_forward = noted
from zero2all.cli.main import main
sys.exit(main())
"""
EMBED = """
import json, os, sys
job = json.loads(sys.argv[1])
os.environ.update(job["environment"])
from zero2all.infer.job import Request
from zero2all.infer.load import load_model
from zero2all.infer.spread import lead_or_follow, make_engine
def load(world):
    return load_model(sys.argv[2], device=world.device, world=world)
def command(world):
    engine = make_engine(load(world))
    made = engine.submit(Request(list(range(5, 45)), 0, pools=True))
    while made.finish is None:
        engine.step()
    print(json.dumps({"pooled": made.pooled.tolist()}))
sys.exit(lead_or_follow(int(sys.argv[4]), int(sys.argv[6]), "cpu", load, command))
"""
TEXTS = ["The capital", "中国的首都", "a", "The capital of France is Paris. The capital of"]


@pytest.fixture
def ranks(start):
    """Run `z2a WORDS` in ranks of this layout; what each printed."""

    def run(tensor, pipeline, *words, code=RANK):
        count, port = tensor * pipeline, free_port()
        shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        layout = ("--parallel.tensor", tensor, "--parallel.pipeline", pipeline)
        programs = []
        for rank in range(count):
            own = {**shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
            job = {"environment": {name: str(value) for name, value in own.items()}, "rank": rank}
            programs.append(start(json.dumps(job), *words, *layout, code=code))
        codes = [program.wait() for program in programs]
        texts = [program.text() for program in programs]
        assert set(codes) == {0}, "\n".join(texts)
        return texts

    return run


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_write_what_one_process_writes(trained_workspace, tmp_path, ranks, tensor, pipeline):
    loaded = load_model("tiny", trained_workspace, device="cpu")
    service = Service(loaded)
    prompts = [
        Prompt(TextRequest(text, 24, Sampling(temperature), logprobs=2)) for temperature in (0.0, 0.8) for text in TEXTS
    ]
    one = sorted(results_of(service, tasks_of(prompts)), key=lambda each: each["index"])
    service.close()
    asked = [{"prompt": text, "temperature": temperature} for temperature in (0, 0.8) for text in TEXTS]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    words = ("generate", "tiny", "--work", trained_workspace.root, "--prompts", tmp_path / "asked.jsonl")
    said = ranks(tensor, pipeline, *words, "--max-new-tokens", 24, "--logprobs", 2, "--device", "cpu")
    found = [each for each in json_lines(said[0]) if "text" in each]
    assert [each["text"] for each in found] == [each["text"] for each in one]
    for ours, theirs in zip(found, one, strict=True):
        logprobs = [each["logprob"] for each in theirs["logprobs"]]
        assert [each["logprob"] for each in ours["logprobs"]] == pytest.approx(logprobs, abs=1e-4)
    layers, _, _, kv_heads, _ = service.engine.blocks.keys.shape
    for text in said:
        (cache,) = (each["cache"] for each in json_lines(text) if "cache" in each)
        assert (cache[0], cache[3]) == (layers // pipeline, max(1, kv_heads // tensor))
    assert f"A rank of stage {pipeline} needs 0.00" in said[0]
    assert not any("text" in each for text in said[1:] for each in json_lines(text)), "only rank 0 speaks"


def test_ranks_give_the_embedding_of_one_process(trained_workspace, ranks):
    model = load_model("tiny", trained_workspace, device="cpu").model
    said = ranks(2, 2, trained_workspace.run("tiny"), code=EMBED)
    (found,) = (each["pooled"] for each in json_lines(said[0]))
    assert found == pytest.approx(model(torch.arange(5, 45)[None])[0].mean(dim=0).tolist(), abs=1e-5)


def test_a_model_that_does_not_fit_says_over_how_many_ranks_it_would(trained_workspace, monkeypatch):
    monkeypatch.setattr(load, "available_memory", lambda: 400_000)
    with pytest.raises(UsageError, match=r"tiny needs 0.6 MB .* has 0.4 MB.* --parallel.tensor 2"):
        load_model("tiny", trained_workspace, device="cpu")
    problems = load._layout_problems
    odd = ["no tensor ranks"]
    monkeypatch.setattr(load, "_layout_problems", lambda *layout: problems(*layout) or odd * (layout[1].tensor > 1))
    with pytest.raises(UsageError, match=r"Spread it over 2 GPUs: --parallel.pipeline 2"):
        load_model("tiny", trained_workspace, device="cpu")
    monkeypatch.setattr(load, "available_memory", lambda: 1000)
    with pytest.raises(UsageError, match="Use a larger machine"):
        load_model("tiny", trained_workspace, device="cpu")


def test_ranks_judge_as_one_process_does(trained_workspace, ranks):
    options = EvalOptions(probes=None, pairs=None)
    one = judge_checkpoint(load_model("tiny", trained_workspace, 15, "cpu"), trained_workspace, options)
    words = (
        "eval",
        "run",
        "tiny",
        "--step",
        15,
        "--work",
        trained_workspace.root,
        "--probes",
        "none",
        "--pairs",
        "none",
    )
    said = ranks(1, 2, *words)
    report = json.loads((trained_workspace.run("tiny") / "eval" / "step-00000015.json").read_text())
    for channel, values in one["documents"].items():
        assert report["documents"][channel]["bits_per_byte"] == pytest.approx(values["bits_per_byte"], rel=1e-5)
    assert "bits" in said[0]
