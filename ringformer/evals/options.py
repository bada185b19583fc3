"""The options of the evaluations, each of which is a flag."""

from dataclasses import dataclass

from ringformer.evals.lines import CASES


@dataclass(kw_only=True)
class EvaluationOptions:
    """Options of every evaluation, besides those of the model."""

    lengths: str | None
    """Contexts in tokens, for prompt and answer together, e.g. 4096,8192 or 4K,8K."""
    out: str | None = None
    """Folder of cases.jsonl, table.txt and the PNG; cases already in it are not evaluated again; default: evals/NAME in
    the run's folder."""
    batch_size: int = 1
    """Cases of one length to evaluate at a time."""


@dataclass(kw_only=True)
class PromptOptions(EvaluationOptions):
    """Options of an evaluation whose cases are prompts."""

    seed: int = 0
    """Seed of the cases (default: 0)."""
    chat: bool = False
    """Format prompts with the model's chat template."""


@dataclass(kw_only=True)
class LinesOptions(PromptOptions):
    """LongEval's line retrieval: give the number in one line among many. An answer is correct if its last number is the
    line's. Reports accuracy by context, as in the paper's Figure 3."""

    lengths: str | None = None
    """Contexts in tokens, for prompt and answer together, e.g. 4096,8192 or 4K,8K."""
    num_lines: str | None = None
    """Instead of --lengths: these numbers of lines, separated by commas, regardless of their tokens."""
    cases: str | None = None
    """Instead of --lengths: a file with LongEval's rows (JSONL), used unchanged."""
    min_value: int = 1
    """The smallest number in a line."""
    max_value: int = 50_000
    """The largest number in a line; outputs label any other range as not LongEval's."""
    num_cases: int | None = None
    """Cases of each length, or documents if there are several --questions; default: 50, or all of a file."""
    questions: int = 1
    """Questions about each document, which is read once; each asks for another line. Intervals are then bootstrapped
    over documents."""


@dataclass(kw_only=True)
class NeedleOptions(PromptOptions):
    """Needle in a haystack: sentences, each with a magic number, are hidden in a long text. Reports the share of the
    requested numbers that appear in the answer, by context and depth, as a heat map."""

    depths: str = "0,10,20,30,40,50,60,70,80,90,100"
    """Depths of the first needle asked for, in percent; default: 0 to 100 in steps of 10."""
    needles: int = 1
    """Number of needles hidden, including those asked for."""
    asked: int = 1
    """Number of needles asked for."""
    haystack: str | None = None
    """File with a UTF-8 text, repeated if it is too short; default: Moby Dick, chapters 1-109, 233,000 tokens."""
    num_cases: int = 3
    """Cases of each length and depth."""


@dataclass(kw_only=True)
class NolimaOptions(PromptOptions):
    """Needles without a literal match, as in NoLiMa: a sentence says beside which landmark a person lives, and the
    question asks who has been in its city or country. Reports the share of answers with the name, by context and
    depth."""

    depths: str = "0,10,20,30,40,50,60,70,80,90,100"
    """Depths of the needle, in percent; default: 0 to 100 in steps of 10."""
    direct: bool = False
    """Ask in the words of the needle: a control."""
    haystack: str | None = None
    """File with a UTF-8 text, repeated if it is too short; default: Moby Dick, chapters 1-109, 233,000 tokens."""
    num_cases: int = 3
    """Cases of each length and depth."""


@dataclass(kw_only=True)
class RulerOptions(PromptOptions):
    """The tasks of RULER with its prompts and its metric: the share of the references that occur in the answer, times
    100. Six of the thirteen tasks need no other data; the rest need the files named below."""

    tasks: str | None = None
    """Names of the tasks to run, separated by commas; default: all whose data are given."""
    essays: str | None = None
    """For niah_single_2 and _3, niah_multikey_1, niah_multivalue and niah_multiquery: the file of the original's
    essays, PaulGrahamEssays.json; a text file; or shipped, the text of `eval needle`, which outputs name."""
    squad: str | None = None
    """For qa_1: the file dev-v2.0.json of SQuAD."""
    hotpotqa: str | None = None
    """For qa_2: the file hotpot_dev_distractor_v1.json."""
    words: str | None = None
    """Folder of adjectivelist.txt, nounlist.txt and verblist.txt from the package wonderwords, the original's words;
    default: ringformer's own words."""
    num_cases: int = CASES
    """Cases of each length and task; the original has 500."""


@dataclass(kw_only=True)
class LongBenchOptions(EvaluationOptions):
    """The tasks of LongBench, with the prompts and the rows of its official files and with its metrics. A prompt that
    is too long loses its middle, as there. Reports the scores by task, and their mean."""

    data: str
    """The folder LongBench of github.com/THUDM/LongBench, with config/ and, from data.zip of its dataset, data/."""
    tasks: str | None = None
    """Names of the tasks to run, separated by commas, e.g. qasper,hotpotqa_e; default: all that the folder has."""
    num_cases: int | None = None
    """Rows of each task; default: all."""
    chat: bool = False
    """Format prompts with the model's chat template, except those of tasks by example and of code."""


@dataclass(kw_only=True)
class HelmetOptions(EvaluationOptions):
    """The tasks of HELMET that its data files hold and no model judges: recall, retrieval-augmented generation and
    re-ranking, with its prompts, examples and metrics. A prompt that is too long loses the end of its documents, as
    there. Reports the scores by task, and their mean."""

    data: str
    """The folder of github.com/princeton-nlp/HELMET with, from data.tar.gz of its dataset, data/."""
    lengths: str | None
    """Contexts in tokens for which HELMET has files: some of 8K,16K,32K,64K,128K."""
    tasks: str | None = None
    """Names of the tasks to run, separated by commas, e.g. json_kv,kilt_nq; default: all whose files are there."""
    num_cases: int | None = 100
    """Questions of each task, as the authors draw them; some are asked with their document at several places."""
    chat: bool = False
    """Format prompts with the model's chat template."""


@dataclass(kw_only=True)
class MrcrOptions(PromptOptions):
    """MRCR: in a long conversation the same request is made several times; give one of its answers again, by its number
    and behind a random prefix. Reports the ratio of matching characters, 0 for an answer without the prefix."""

    needles: int = 2
    """Times that the request is made; the original has 2, 4 and 8."""
    text: str | None = None
    """File with a UTF-8 text, whose paragraphs are the answers; default: Moby Dick, chapters 1-109."""
    num_cases: int = 20
    """Cases of each length; the original has 100."""


@dataclass(kw_only=True)
class StoreOptions(EvaluationOptions):
    """Options of an evaluation on the documents of a token store."""

    lengths: str | None
    """Contexts in tokens, e.g. 4096,8192 or 4K,8K."""
    store: str
    """Token store, or a folder of stores, whose eval/ is preferred."""
    documents: int = 32
    """Number of documents, each at least as long as the longest context."""
    batch_size: int = 1
    """Stretches of documents to read at a time, best a multiple of dp."""


@dataclass(kw_only=True)
class PerplexityOptions(StoreOptions):
    """Loss on the documents of a token store: of the same last tokens with longer and longer contexts, and at the
    longest context by position, in powers of two. Reports nats per token, bits per byte and perplexity."""

    last: int | None = None
    """Number of last tokens to compare; default: half of the shortest context."""


@dataclass(kw_only=True)
class SlidingOptions(StoreOptions):
    """Perplexity of whole documents with a sliding window, as Position Interpolation, YaRN and LongLoRA report it:
    windows of each length, of which only the last tokens count."""

    stride: int = 256
    """Tokens between the beginnings of two windows."""
    tokens: int | None = None
    """First tokens of each document to measure, its BOS token included if it has one; default: all."""


@dataclass(kw_only=True)
class LongPPLOptions(StoreOptions):
    """LongPPL: perplexity of the key tokens, those that the long context decides (Fang et al. 2024). Also reports their
    share, and the perplexity of all tokens."""

    evaluator: str | None = None
    """Model that finds the key tokens: a run, a converted model or a Hugging Face checkpoint with the same tokenizer;
    default: the evaluated model."""
    short: int = 4096
    """Fewest tokens of a short context."""
    stride: int = 1024
    """Tokens that share the beginning of their short context."""
    alpha: float = 2.0
    """Nats by which the long context must lower the loss of a key token."""
    beta: float = -2.0
    """log p that a key token must exceed with the long context."""


@dataclass(kw_only=True)
class HarnessOptions(EvaluationOptions):
    """Tasks of lm-evaluation-harness 0.4.13, computed as by its own models of Hugging Face; prints its table."""

    lengths: str | None = None
    """The context in tokens, for prompt and answer together; longer prompts are truncated from the left; default: the
    model's."""
    tasks: str
    """Names of tasks or groups, separated by commas."""
    num_fewshot: int | None = None
    """Examples before each question; default: the task's."""
    limit: int | None = None
    """Documents of each task; default: all."""
    include_path: str | None = None
    """Folder with tasks of your own (YAML)."""
    chat: bool = False
    """Format prompts with the model's chat template."""
