"""The Model Context Protocol (MCP), in both directions."""
