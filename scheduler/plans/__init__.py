"""Plans of statements: which call goes where and when."""
