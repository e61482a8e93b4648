"""Node choice by a cost in seconds, dispatch and retries; a library inside the front."""
