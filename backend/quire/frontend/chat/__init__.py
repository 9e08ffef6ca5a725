"""What an answer to chat messages is made of: content, reasoning and tool calls."""
