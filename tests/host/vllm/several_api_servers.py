"""``vllm serve``, whose command the CPU package of vLLM 0.32 lacks: one API server for each data-parallel rank."""

if __name__ == "__main__":
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    serve = ServeSubcommand()
    serve.validate(arguments)
    serve.cmd(arguments)
