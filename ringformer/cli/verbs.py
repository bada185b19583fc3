"""The verbs of the command line, and the room in which each stands."""

VERBS = {
    "train": ("train.commands:add_train", "train a model, or go on with a run"),
    "estimate": ("estimate.commands:add_estimate", "compile training or inference for absent hardware: does it fit?"),
    "plan": ("estimate.search.commands:add_plan", "the fastest settings that fit a context, or the longest context"),
    "tune": (
        "estimate.kernels.commands:add_tune",
        "the fastest chunks for the TPU kernels, without the TPU",
    ),
    "generate": ("inference.commands:add_generate", "continue a prompt, or chat, with the model of a run"),
    "data prepare": ("data.commands:add_prepare", "tokenize documents or conversations into a store"),
    "data inspect": ("data.commands:add_inspect", "show documents of a store, and what of them is trained on"),
    "data tokenizer": ("data.commands:add_tokenizer", "train a SentencePiece tokenizer"),
    "convert from-hf": ("convert.commands:add_from_hf", "a LLaMA of Hugging Face to a folder for --config.init_from"),
    "convert to-hf": ("convert.commands:add_to_hf", "a run's checkpoint to a folder that transformers loads"),
    "convert verify": ("convert.commands:add_verify", "compare the logits of transformers and of ringformer"),
    "eval lines": ("evals.commands:add_lines", "line retrieval: the number of one line among many, by context"),
    "eval needle": ("evals.commands:add_needle", "needles in a haystack: what is found, by context and depth"),
    "eval ruler": ("evals.commands:add_ruler", "tasks of RULER that need no outside data, by context"),
    "eval perplexity": ("evals.perplexity_command:add_perplexity", "the loss on a store by position and by context"),
    "checkpoint list": ("runs.commands:add_list", "the checkpoints of a run"),
    "checkpoint inspect": ("runs.commands:add_inspect", "what is in a checkpoint"),
    "checkpoint copy": ("runs.commands:add_copy", "a run's checkpoints to an object store, or back"),
    "checkpoint verify": ("runs.commands:add_verify", "compare checkpoints with the hashes saved with them"),
    "configs list": ("cli.shipped_configs:add_list", "the configs that come with ringformer"),
    "configs copy": ("cli.shipped_configs:add_copy", "copy one of them, to change it"),
    "tables": ("paper.commands:add_tables", "search the longest contexts of the paper's Table 3, compiled"),
}
"""Each verb's `MODULE:FUNCTION`, which adds its arguments to a parser and returns what runs it; its line of help."""

GROUPS = {
    "data": "prepare and look at token stores",
    "convert": "Hugging Face checkpoints in and out",
    "eval": "what a model makes of its context",
    "checkpoint": "look at the checkpoints of a run, or of a converted model",
    "configs": "the configs that come with ringformer",
}
