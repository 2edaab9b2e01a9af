train = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=8, max_iters=20, eval_interval=5, warmup_iters=2)
prepare_reward_data = dict(samples_per_chunk=4, max_blocks=40)
train_reward_model = dict(lm_iters=4, lm_eval_interval=2)
train_grpo = dict(prompts_per_step=4, group_size=4, max_steps=3, eval_interval=1, allow_blind_reward=True)
