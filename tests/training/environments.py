"""Environments of the tests: answers that depend on the action, rewards on every turn, and episodes that fail on
purpose.
"""

import os
import time


class Countdown:
    """``turns`` turns; each pays the share of ``e`` and spaces in the action, and is answered by a message about it.
    ``fail``: {turn: how} of tasks whose prompt holds the word ``fail``; those with the word ``reset`` do not begin."""

    def __init__(self, turns=3, fail=None, goal_after=None):
        self.turns, self.fail, self.goal_after = turns, fail or {}, goal_after

    def reset(self, task, seed):
        self.left, self.bad = self.turns, "fail" in task["prompt"][-1]["content"]
        if "reset" in task["prompt"][-1]["content"]:
            raise RuntimeError("no start")
        return [{"role": "system", "content": f"count {self.turns}"}, *task["prompt"]]

    def step(self, action):
        how = self.fail.get(str(self.turns - self.left)) if self.bad else None
        if how == "hang":
            time.sleep(3600)
        if how == "crash":
            os._exit(7)
        if how == "raise":
            raise RuntimeError("no more")
        if how == "eat":
            self.kept = [bytearray(10**7) for _ in range(10**4)]
        self.left -= 1
        reward = sum(c in "e " for c in action) / (len(action) + 1)
        events = [f"turn{self.turns - self.left}", f"fields:{min(len(action), 4)}/4"]
        if self.goal_after and self.turns - self.left >= self.goal_after:
            return [], reward, True, [*events, "goal_verified"]
        return (
            [{"role": "tool", "content": f"{self.left} left after {len(action)} <|im_end|> letters"}],
            reward,
            self.left == 0,
            events,
        )


class Seeded:
    """Pays what its seed says, whatever is done."""

    def reset(self, task, seed):
        self.paid = seed % 1009
        return [{"role": "user", "content": "go"}]

    def step(self, action):
        return [], self.paid, True, []


class Moody:
    """Starts every episode differently, which a group cannot compare."""

    def __init__(self):
        self.started = time.monotonic_ns()

    def reset(self, task, seed):
        return [{"role": "user", "content": str(self.started)}]

    def step(self, action):
        return [], 0.0, True, []


class Forgetful:
    """Answers every action with the time of day, so that an episode cannot be played again."""

    def reset(self, task, seed):
        self.turn = 0
        return [{"role": "user", "content": "go"}]

    def step(self, action):
        self.turn += 1
        return [{"role": "tool", "content": str(time.monotonic_ns())}], float(len(action)), self.turn == 3, []


class Careless:
    """Answers its first action with what the task's text names in ``ANSWERS``, as environments of people do who have
    not read the interface closely.
    """

    SAID = [{"role": "tool", "content": "ok"}]
    ANSWERS = {
        "half": lambda: ([{"role": "tool", "content": "a\ud83db"}], 0.5, False, ["seen:\ud83d"]),
        "number": lambda: ([{"role": "tool", "content": 12}], 0.5, False, ()),
        "raises": lambda: 1 / int("\ud83d"),
        "events": lambda: (Careless.SAID, 0.5, False, "goal_verified"),
        "no events": lambda: (Careless.SAID, 0.5, False, None),
        "done": lambda: (Careless.SAID, 0.5, "False", []),
        "reward": lambda: (Careless.SAID, None, False, []),
        "one message": lambda: (Careless.SAID[0], 0.5, False, []),
        "text": lambda: ("ok", 0.5, False, []),
        "nothing": lambda: None,
        "no role": lambda: ([{"content": "ok"}], 0.5, False, []),
    }

    def reset(self, task, seed):
        self.how, self.turn = task["prompt"][-1]["content"], 0
        return [{"role": "user", "content": f"go \udcff{self.how}"}]

    def step(self, action):
        self.turn += 1
        return self.ANSWERS[self.how]() if self.turn == 1 else ([], 1.0, True, ["goal_verified"])
