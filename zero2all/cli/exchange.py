"""`z2a export` and `z2a import`."""

import argparse

from zero2all.cli.verb import verb, workspace_of
from zero2all.common.errors import UsageError
from zero2all.common.progress import tell

LOADED_BY = {"hf": "transformers.AutoModelForCausalLM", "mlx": "mlx_lm.load", "gguf": "llama.cpp, ollama, LM Studio"}


@verb("""
    export: write a run as a Hugging Face folder, or as one GGUF file

    run? --work
    --to hf|gguf|mlx =hf               hf (default): a Hugging Face folder; mlx: the same, which mlx-lm loads; gguf: one
        file for llama.cpp, ollama and LM Studio
    --out PATH:named_path              folder to write, new or empty, or the GGUF file; a run with adapters (LoRA) is
        merged
    --type/kind f32|f16|bf16|q8_0|q4_0  gguf: type of the matrices (default f16)
    --adapter DIR:outdir               write the adapters of the run alone, as a folder for peft
    --step
    --dtype float32|bfloat16|float16  dtype of the weights (default: that of an imported model, else float32)
    --tokenizer/tokenizer_layout safe|compatible =safe  safe (default): text can never become a control token;
        compatible: ordinary added tokens and a chat template, for tools that render chats as text

    z2a export my-run --work my-workspace --out my-model-hf
    z2a export my-run --work my-workspace --to gguf --type q8_0 --out my-model.gguf
    z2a export my-run-sft --work my-workspace --adapter my-adapter
    """)
def _export(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import require_writable

    if arguments.out is not None:
        require_writable(arguments.out, "--out", is_folder=arguments.to != "gguf")

    from zero2all.exchange import export_adapter, export_run, require_new
    from zero2all.gguf import export_gguf
    from zero2all.infer.load import load_run

    workspace = workspace_of(arguments)
    if arguments.out is None and arguments.adapter is None:
        raise UsageError("There is nothing to write. Name a folder with --out, for the model, or --adapter.")
    if arguments.to == "gguf" and arguments.dtype is not None:
        raise UsageError("A GGUF file has a --type, not a --dtype.")
    if arguments.to != "gguf" and arguments.kind is not None:
        raise UsageError("--type is for --to gguf. The weights of a folder have a --dtype.")
    if arguments.out is not None and arguments.to != "gguf":
        require_new(arguments.out)
    if arguments.adapter is not None:
        step = export_adapter(workspace.run(arguments.run), arguments.adapter, arguments.step)
        tell(f"{arguments.adapter}: the adapters of {arguments.run} at step {step}, for peft.PeftModel.from_pretrained")
    if arguments.out is None:
        return
    loaded = load_run(workspace, arguments.run, arguments.step)
    if arguments.to == "gguf":
        export_gguf(loaded, workspace.tokenizer, arguments.out, arguments.kind or "f16")
    else:
        export_run(loaded, workspace.tokenizer, arguments.out, arguments.dtype, arguments.tokenizer_layout)
    tell(f"{arguments.out}: {loaded.name} at step {loaded.step}, for {LOADED_BY[arguments.to]}")


@verb("""
    import: start a run from a Hugging Face folder, or the GGUF file, of a Llama or Qwen model

    folder FOLDER:path    the Hugging Face folder, or a .gguf file, on this machine
    --work
    --name! NAME          name of the new run
    --tokenizer DIR:path  use this extension of its tokenizer (made with z2a tokenizer extend)
    --adapter DIR:path    adapters of peft (LoRA) for this model; the run has them, and uses the merged model
    --resize-embeddings   give the model an embedding row for every token id

    z2a import path/to/hf-folder --work my-workspace --name continued
    """)
def _import(arguments: argparse.Namespace) -> None:
    from zero2all.common.workspace import Workspace
    from zero2all.exchange import import_folder
    from zero2all.gguf import import_gguf

    workspace, tokenizer = Workspace(arguments.work), arguments.tokenizer
    bring = import_gguf if arguments.folder.is_file() else import_folder
    options = {"resize_embeddings": arguments.resize_embeddings, "adapter": arguments.adapter}
    done = bring(arguments.folder, workspace, arguments.name, tokenizer_folder=tokenizer, **options)
    if done.resized is not None:
        rows = done.resized
        tell(
            f"embeddings: {rows.rows_before:,} rows before, {rows.rows:,} now; {rows.new_ids:,} new "
            f"ids, each initialised with the mean of its old pieces ({rows.mean_pieces:.1f} on average)"
        )
    run = done.run
    tell(f"{run}: ready at step 0. Check its config.yaml, pack your data with its tokenizer, then train it:")
    print(f"  z2a train {run / 'config.yaml'} --work {arguments.work}")
