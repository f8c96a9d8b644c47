# The settings of volcengine/verl at b178a3c, examples/grpo_trainer/run_qwen2-7b_math.sh
first=$DATA/gsm8k/train.parquet
train_files="['$first', '$DATA/math/train.parquet']"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files="$train_files" \
    data.val_files="['$DATA/gsm8k/test.parquet', '$DATA/math/test.parquet']" data.train_batch_size=1024 \
    data.max_prompt_length=1024 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 algorithm.use_kl_in_reward=False trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 \
    trainer.test_freq=5 trainer.total_epochs=15 $@
