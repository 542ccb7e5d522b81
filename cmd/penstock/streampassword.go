package main

import (
	"bufio"
	"errors"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"penstock.io/penstock/stream"
)

func newStreamPassword() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "password USER",
		Short: "Add a user of a gateway, or change the user's password",
		Long: `Reads a password from the first line of its input, and writes what proves the
password to a file of users. The file has no password; it is made if it is missing,
with mode 0600. A gateway with this file asks Kafka clients to log in with
SASL: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. A change of the file counts from the next
connection on.`,
		Example: `  penstock stream password ann --file /etc/penstock/users.json < password
  penstock up --dir /var/lib/penstock --stream-users /etc/penstock/users.json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if file == "" {
				return usagef("say which file has the users: --file FILE")
			}
			line, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			return stream.SetPassword(file, args[0], strings.TrimRight(line, "\r\n"))
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "file of the users")
	return cmd
}
