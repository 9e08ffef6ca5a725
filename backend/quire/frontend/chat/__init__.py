"""Parsers of answers to chat messages: content, reasoning and tool calls."""
