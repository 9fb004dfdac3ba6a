"""Configurations of other trainers as recipes: torchtitan, DeepSpeed, Megatron-LM."""
