"""The verbs of the command line, and the function of each."""

VERBS = {
    "train": ("train.commands:add_train", "train a model, or resume a run"),
    "estimate": ("estimate.commands:add_estimate", "compile training or inference for other hardware: does it fit?"),
    "plan": ("estimate.search.commands:add_plan", "find the fastest settings for a context, or the longest context"),
    "tune": ("estimate.kernels.commands:add_tune", "find the fastest chunks for the TPU kernels, without a TPU"),
    "generate": ("inference.commands:add_generate", "continue a prompt, or chat, with the model of a run"),
    "data prepare": ("data.commands:add_prepare", "tokenize documents or conversations into a store"),
    "data inspect": ("data.commands:add_inspect", "show documents of a store, and which tokens are trained on"),
    "data tokenizer": ("data.commands:add_tokenizer", "train a SentencePiece tokenizer"),
    "convert from-hf": (
        "convert.commands:add_from_hf",
        "convert a Hugging Face model to a folder for --config.init_from",
    ),
    "convert to-hf": ("convert.commands:add_to_hf", "export a run's checkpoint to a folder that transformers loads"),
    "convert to-peft": ("convert.commands:add_to_peft", "export a run's adapters to a folder that PEFT loads"),
    "convert verify": ("convert.commands:add_verify", "compare the logits of transformers and ringformer"),
    "eval lines": (
        "evals.commands:add_lines",
        "line retrieval: accuracy on the number of one line among many, by context",
    ),
    "eval needle": ("evals.commands:add_needle", "needle in a haystack: recall by context and depth"),
    "eval nolima": ("evals.commands:add_nolima", "needles that share no word with the question"),
    "eval mrcr": ("evals.commands:add_mrcr", "one of several answers to the same request in a long conversation"),
    "eval ruler": ("evals.commands:add_ruler", "tasks of RULER that need no outside data, by context"),
    "eval helmet": ("evals.commands:add_helmet", "tasks of HELMET, from its official files"),
    "eval longbench": ("evals.commands:add_longbench", "tasks of LongBench, from its official files"),
    "eval perplexity": ("evals.commands:add_perplexity", "loss on a store, by position and by context"),
    "eval sliding": ("evals.commands:add_sliding", "perplexity of a store with a sliding window"),
    "eval longppl": ("evals.commands:add_longppl", "LongPPL: perplexity of the tokens that a long context decides"),
    "eval harness": ("evals.commands:add_harness", "tasks of lm-evaluation-harness"),
    "eval report": ("evals.commands:add_report", "one table of all evaluations that a model has"),
    "checkpoint list": ("runs.commands:add_list", "list the checkpoints of a run"),
    "checkpoint inspect": ("runs.commands:add_inspect", "show the contents of a checkpoint"),
    "checkpoint copy": ("runs.commands:add_copy", "copy a run's checkpoints to an object store, or back"),
    "checkpoint verify": ("runs.commands:add_verify", "compare checkpoints with the hashes saved with them"),
    "configs list": ("cli.shipped_configs:add_list", "list the configs shipped with ringformer"),
    "configs copy": ("cli.shipped_configs:add_copy", "copy a config in order to change it"),
    "tables": ("paper.commands:add_tables", "search the longest contexts of the paper's Table 3, compiled"),
}
"""`MODULE:FUNCTION` of each verb, and the verb's help. FUNCTION adds the verb's arguments to a parser and returns the
function to run."""

GROUPS = {
    "data": "prepare and inspect token stores",
    "convert": "import and export Hugging Face checkpoints",
    "eval": "evaluate how a model uses its context",
    "checkpoint": "inspect the checkpoints of a run, or of a converted model",
    "configs": "configs shipped with ringformer",
}
