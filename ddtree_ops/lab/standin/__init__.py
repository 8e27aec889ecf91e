"""A server that stands in for SGLang on hosts without a GPU. It decodes nothing and says so wherever it is asked.

Standard library only, Python 3.8 or newer; installed in the lab hosts' virtual environment as ``ddtree_standin`` and
started as ``python -m ddtree_standin FLAGS``. It keeps to the SGLang sources that are on its import path: the flags are
those of their ``server_args.py`` (and of the DDTree plugin beside them), ``/ready`` exists if their HTTP server has it.
What it answers is made up, but deterministic: tokens depend on the prompt alone, times and accept lengths on the mode.

Everything below is set by environment variables, or by lines ``NAME=VALUE`` of the file ``/etc/ddtree-lab/faults``
(the file is for breaking a host without changing what is deployed there; the environment wins).

    STANDIN_ONLY=tree | budget=64 | weight_version=ab12   apply the faults below only to a server that is started so

    STANDIN_LOAD_S=1.0            seconds from start to open port: weights, graphs
    STANDIN_WARM_S=0.3            seconds from open port to healthy
    STANDIN_TOK_S=tree=117,...    tokens a second of one stream, for each mode
    STANDIN_ACCEPT=tree=6.1,...   mean accept length, for each mode
    STANDIN_DRAIN_S=0.2           how often it looks whether the drain is over (SGLang: 5)

    STANDIN_CRASH_AT_START=1      out of memory while loading, exit status 1
    STANDIN_CRASH_AFTER_S=2       dies 2 s after it became healthy
    STANDIN_HANG_LOADING=1        never gets past loading the weights
    STANDIN_HANG_COMPLETION=1     healthy, but no completion ever ends
    STANDIN_SHORT_COMPLETION=1    completions end after half the tokens asked for
    STANDIN_WEIGHT_VERSION=x      answers as another release
    STANDIN_BUDGET=8              resolves another budget than asked, with a warning in its log
    STANDIN_MODE=linear           runs another mode than asked
    STANDIN_REFUSE_HYBRID=1       refuses trees on a hybrid target without the unsafe flag, as an unproven engine does
    STANDIN_DIVERGE_AT=20         in tree mode the tokens differ from position 20 on
    STANDIN_SLOW_STOP_S=30        takes 30 s from SIGTERM to its end
    STANDIN_STRAY_CHILD=1         leaves a child behind that ignores SIGTERM and holds GPU memory
"""

NOTICE = "ddtree-ops lab stand-in: this is not SGLang, nothing is decoded"
