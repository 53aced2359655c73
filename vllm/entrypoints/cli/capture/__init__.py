# SPDX-License-Identifier: Apache-2.0
"""`vllm capture`: from prompts to a data set of captured rows."""
