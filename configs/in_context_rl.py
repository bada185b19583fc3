"""In-context reinforcement learning from scratch: a LLaMA of 0.1M parameters that finds hidden goals.

Reproduces: the claim of the paper's section 5.4 (Table 5) that more experience in the context makes a better agent, in
a small world, not its numbers. Hardware: none, simulated devices. One store has the chains of all stages, and each
stage selects chains by length: 4 episodes, then 16 and 32, then 64 and 128 on the ring. Only the expert's steps at the
end of a chain are trained on.

    bash experiments/experience.sh      # makes the chains, trains with the next command, and lets the models play
    ringformer train --config=configs/in_context_rl.py
"""

from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.model.vocab_size = 257
    config.model.hidden_size = 64
    config.model.intermediate_size = 128
    config.model.num_layers = 3
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.head_dim = 16
    config.model.tie_embeddings = True
    config.model.init_std = 0.125  # 1/sqrt(D)
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.run_dir = "runs/experience/run"
    config.data.store = "runs/experience/store"
    config.data.source = "jsonl:runs/experience/chains.jsonl"
    config.data.tokenizer = "runs/experience/tokenizer"
    config.data.format = "messages"
    config.data.template = "tokenizer"
    config.data.clean = ""
    config.data.held_out = 0.02
    config.data.packing = "whole"
    config.cpu_devices = 2  # the script uses eight for the stage on the ring
    config.eval_batches = 1
    config.checkpoint_every = 250
    config.optimizer.b2 = 0.98
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 20

    def stage(tokens, batch_size, steps, learning_rate, chains, **changed):
        lengths = {"data.min_length": chains[0], "data.max_length": chains[1]}
        settings = {"seq_len": tokens, "batch_size": batch_size, "steps": steps, "mesh_dim": "-1,1,1,1"}
        return settings | lengths | {"optimizer.learning_rate": learning_rate} | changed

    config.stages = (
        stage(512, 16, 1200, 2e-3, (0, 300)),
        stage(1024, 8, 400, 1e-3, (301, 1024), **{"model.rope_theta": 1e6}),
        stage(4096, 4, 200, 1e-3, (1025, 4096), **{"mesh_dim": "1,1,1,-1", "model.rope_theta": 1e6}),
    )
    return config
