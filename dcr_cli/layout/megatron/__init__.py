"""The layouts of the shards of Megatron-Core's ranks. Which module owns what is said by each of them."""
