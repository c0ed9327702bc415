from launch.cli.main import main

main()
