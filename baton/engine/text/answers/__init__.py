"""What a model's answer consists of: content, reasoning and tool calls, told apart as its text arrives."""
