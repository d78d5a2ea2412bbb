"""What a run's rule does, in plain words: a sentence for each choice that says something."""

from __future__ import annotations

from collections.abc import Callable

from fedjax_hk.settings.config import Config, value_of

OPINION_WORDS = {
    "weights": "the weights of their trained models",
    "update": "what they learned in the round",
    "centered": "their weights minus the mean",
}


def rule_in_words(config: Config) -> list[str]:
    """Who is grouped with whom first, then how models are trained and averaged, then served."""
    rule = config.rule()
    grouped = GROUPING_WORDS[rule.grouping](config)
    sentences = [
        SELECT_WORDS[rule.select](config),
        LOCAL_WORDS[rule.local](config),
        ALIGN_WORDS[rule.align],
        f"Parameters that match {config.personal_layers} stay at the clients."
        if config.personal_layers
        else "",
    ]
    if rule.serve == "global" and rule.select != "pooled":
        sentences += [_global_model(config), SERVER_WORDS[rule.server_opt](config)]
    served = "the one global model"
    if rule.serve == "coalition":
        served = "the model of its own coalition"
        if rule.grouping == "singletons":
            served = "its own model"
        else:
            sentences.append(f"In a coalition, {WITHIN_WORDS[rule.within](config)}.")
    sentences.append(f"Each client is served and judged with {served}.")
    return [grouped, " ".join(one for one in sentences if one)]


def _opinion(config: Config) -> str:
    what = OPINION_WORDS[config.rule().opinion]
    return f"{what} (only {config.opinion_leaves})" if config.opinion_leaves else what


def _near(config: Config) -> str:
    """When one client listens to another."""
    rule, tau = config.rule(), value_of(config, "tau")
    if rule.grouping == "hk_band":
        bounds = (value_of(config, name) for name in ("eps_lower", "eps_upper"))
        kind = "affinity quantile" if config.tau_mode == "quantile" else "cosine"
        return "their {} is from {:g} to {:g}".format(kind, *bounds)
    if config.epsilon is not None:
        return f"they are at most {config.epsilon:g} apart"
    if config.tau_mode == "quantile":
        return f"they are among the closest {100 * (1 - tau):.3g} % of the pairs"
    if rule.grouping == "hk_euclidean":
        return f"they are within tau = {tau:g} ({config.euclid_tau}) on unit vectors"
    return f"their cosine is at least {tau:g}"


def _hk(config: Config) -> str:
    return (
        f"Clients compare {_opinion(config)} and listen to each other if {_near(config)}; who ends "
        "up at one opinion is a coalition."
    )


def _fixed_k(config: Config) -> str:
    num_k = value_of(config, "num_coalitions")
    measure = "distance" if config.rule().grouping == "fixed_k_euclidean" else "cosine"
    return f"Clients are grouped around {num_k:g} centers by the {measure} of {_opinion(config)}."


def _affinity_propagation(config: Config) -> str:
    return (
        f"Clients choose exemplars among themselves by affinity propagation on the cosines of "
        f"{_opinion(config)}; who chooses the same one is a coalition."
    )


def _agglomerative(config: Config) -> str:
    layer = "" if config.opinion_leaves else ", of the output layer only"
    share = 100 * (1 - value_of(config, "tau"))
    limit = f"the distance that {share:.3g} % of the pairs stay below"
    if config.epsilon is not None:
        limit = f"{config.epsilon:g}"
    return (
        f"Clients are grouped once, in the first round, by {_opinion(config)}{layer}: groups "
        f"closer than {limit} merge ({config.linkage} linkage). Newcomers join the nearest group."
    )


GROUPING_WORDS: dict[str, Callable[[Config], str]] = {
    "none": lambda config: (
        "No coalitions: one model is trained on the samples of all clients at once; nothing is "
        "federated."
        if config.rule().select == "pooled"
        else "No coalitions: the server makes one model of all that it gets."
    ),
    "singletons": lambda config: "No federation: every client trains alone.",
    "hk_cosine": _hk,
    "hk_euclidean": _hk,
    "hk_band": _hk,
    "fixed_k_euclidean": _fixed_k,
    "fixed_k_cosine": _fixed_k,
    "affinity_propagation": _affinity_propagation,
    "agglomerative": _agglomerative,
    "planted": lambda config: (
        "Coalitions are the true groups that the embedded fleet was made with; its outliers are "
        "alone."
    ),
}

SELECT_WORDS: dict[str, Callable[[Config], str]] = {
    "uniform": lambda config: "",
    "distance_decay": lambda config: (
        "Who takes part: those whose models went farthest, fewer each round (by the factor "
        f"exp(-{value_of(config, 'select_decay'):g}))."
    ),
    "pooled": lambda config: "",
}

LOCAL_WORDS: dict[str, Callable[[Config], str]] = {
    "plain": lambda config: "",
    "prox": lambda config: (
        f"Training is pulled back to the round's start (FedProx, mu = {value_of(config, 'mu'):g})."
    ),
    "perfedavg_fo": lambda config: _meta(config, "first-order"),
    "perfedavg_hf": lambda config: _meta(config, "with the Hessian"),
    "scaffold": lambda config: (
        "Control variates take each client's drift out of its gradients (SCAFFOLD, option II)."
    ),
    "scaffold_start": lambda config: (
        "Control variates take each client's drift out of its gradients (SCAFFOLD, option I)."
    ),
}


def _meta(config: Config, form: str) -> str:
    return (
        "Training looks for a model that adapts to a client in one step (Per-FedAvg, "
        f"{form}, alpha = {value_of(config, 'alpha'):g})."
    )


ALIGN_WORDS = {
    "none": "",
    "neurons": "Hidden neurons are matched to the global model's before anything is averaged (FedMA).",
}

WITHIN_WORDS: dict[str, Callable[[Config], str]] = {
    "uniform": lambda config: "clients weigh the same",
    "samples": lambda config: "clients weigh by their training samples",
    "distance": lambda config: (
        "clients weigh by their training samples, and "
        f"{'less' if value_of(config, 'beta') < 0 else 'more'} the farther their models went "
        f"(beta = {value_of(config, 'beta'):g})"
    ),
    "krum": lambda config: (
        f"the models of {100 * value_of(config, 'trim'):.3g} % of the clients, those that are far "
        "from the others, do not count (multi-Krum)"
    ),
}

BETWEEN_WORDS = {
    "equal": "every coalition weighs the same",
    "size": "coalitions weigh by their members",
    "samples": "coalitions weigh by their training samples",
}

AVERAGE_WORDS: dict[str, Callable[[Config], str]] = {
    "mean": lambda config: "the mean of the clients' models",
    "nova": lambda config: "the mean of updates that are divided by their local steps (FedNova)",
    "median": lambda config: "the median of the clients' models, parameter by parameter",
    "trimmed_mean": lambda config: (
        f"the mean of the clients' models without {100 * value_of(config, 'trim'):.3g} % of them "
        "at each end, parameter by parameter"
    ),
}

SERVER_WORDS: dict[str, Callable[[Config], str]] = {
    "mean": lambda config: "",
    **{
        name: lambda config, title=title: (
            f"The server takes its distance to the last model for a gradient of {title}, learning "
            f"rate {value_of(config, 'server_lr'):g}."
        )
        for name, title in {
            "sgd": "SGD", "adam": "Adam", "yogi": "Yogi", "adagrad": "Adagrad",
        }.items()
    },
}  # fmt: skip


def _global_model(config: Config) -> str:
    rule = config.rule()
    weighed = WITHIN_WORDS[rule.within](config)
    plain = (rule.within, rule.between) in (("uniform", "size"), ("samples", "samples"))
    if rule.grouping != "none" and not plain:
        weighed = f"{BETWEEN_WORDS[rule.between]}, and in a coalition {weighed}"
    return f"The global model is {AVERAGE_WORDS[rule.average](config)}; {weighed}."
