"""Node choice by one cost in seconds, dispatch and retries; a library inside the front."""
