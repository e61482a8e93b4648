"""Who runs it: node choice by one cost in seconds, dispatch, retry; a library inside the front."""
