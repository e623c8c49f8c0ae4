"""Why a server is slow: facts of each model, findings made of them, and a page of plain text."""
