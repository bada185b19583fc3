"""From a model of Hugging Face to text, as transformers says it: the command, a batch and a chat on a ring."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from ringformer.cli import main
from ringformer.inference.text.chat import Chat
from ringformer.inference.text.text_generator import TextGenerator
from tests.convert.models import save_model
from tests.data.chat_samples import chat, llama3

PROMPT, QUESTION = "The ring carries", "what is a ring?"
NEW = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model that was never trained, with LLaMA-3's kind of tokenizer, and its conversion."""
    folder = tmp_path_factory.mktemp("hf")
    save_model(folder / "hf", "llama_3", vocab_size=420, max_position_embeddings=512, num_hidden_layers=1)
    llama3(folder / "hf")
    assert main(["convert", "from-hf", str(folder / "hf"), str(folder / "model")]) == 0
    return folder / "hf", folder / "model"


@pytest.fixture(scope="module")
def theirs(folders):
    """Prompts and answers of transformers: the tokens of a prompt or a conversation, and the text that follows."""
    tokenizer, model = AutoTokenizer.from_pretrained(folders[0]), LlamaForCausalLM.from_pretrained(folders[0])
    ends = [2, tokenizer.eos_token_id]

    def answer(asked, most=NEW):
        ids = (
            tokenizer(asked)["input_ids"]
            if isinstance(asked, str)
            else tokenizer.apply_chat_template(
                [message._asdict() for message in asked], add_generation_prompt=True, return_dict=False
            )
        )
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=2,
        )
        new = out[0, len(ids) :].tolist()
        return ids, tokenizer.decode([i for i in new if i not in ends], skip_special_tokens=True)

    return answer


def test_the_command(folders, theirs, capsys):
    capsys.readouterr()
    options = [f"--max_new_tokens={NEW}", "--compute_dtype=float32"]
    assert main(["generate", f"--run={folders[1]}", "--chat", f"--prompt={QUESTION}", *options]) == 0
    out, err = capsys.readouterr()
    ids, text = theirs(chat(QUESTION))
    assert out == text + "\n"
    assert f"prompt of {len(ids)} tokens; prefill " in err and err.endswith(" tokens/s\n")


@pytest.mark.slow
def test_a_batch_and_a_chat_on_a_ring(folders, theirs):
    model = TextGenerator.load(folders[1], mesh_dim="1,1,1,2", max_length=128, compute_dtype="float32")
    assert model.complete([PROMPT, "a"], max_new_tokens=NEW) == [theirs(PROMPT)[1], theirs("a")[1]]
    conversation = Chat(model, "You are a ring.")
    for question, most in ((QUESTION, 1), ("and then?", 9)):
        answer = conversation.ask(question, max_new_tokens=most)
        text = "".join(answer)
        ids, expected = theirs(conversation.messages, most)
        assert text == expected
        assert answer.session.lengths == [len(ids) + len(answer.ids)]
