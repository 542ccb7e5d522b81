package main

import (
	"bufio"
	"errors"
	"io"
	"math"
	"strings"

	"github.com/spf13/cobra"

	"penstock.io/penstock/stream"
)

func newStreamPassword() *cobra.Command {
	var file string
	var uid uint32
	var gids []uint
	var none bool
	cmd := &cobra.Command{
		Use:   "password USER",
		Short: "Add a user of a gateway, or change the user's password or ids",
		Long: `Reads a password from the first line of standard input, and writes keys that check the
password to a file of users. The file has no passwords; if the file is missing, the
command makes it with mode 0600. A gateway with this file asks Kafka clients to log in
with SASL (PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512), and HTTP and gRPC clients with Basic
authentication.

--uid and --gid are the ids by which modes and ACLs of directories count for the user;
directories that the user makes get the first --gid. A new user needs both flags. User
id 0 may use every stream. With --no-password the command sets no password (an existing
password stays), and the user logs in with a client certificate that has USER as its
common name.

After a change of the password, and after the removal of the user from the file, the
user's open Kafka connections end within 10 seconds, and further requests are refused.`,
		Example: `  penstock stream password ann --file /etc/penstock/users.json --uid 1000 --gid 1000 < password
  penstock stream password loader --file /etc/penstock/users.json --uid 1001 --gid 1001 --no-password
  penstock up --dir /var/lib/penstock --stream-users /etc/penstock/users.json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if file == "" {
				return usagef("say which file has the users: --file FILE")
			}
			var ids *stream.User
			switch uids := cmd.Flags().Changed("uid"); {
			case uids != (len(gids) > 0):
				return usagef("--uid and --gid go together")
			case uids:
				ids = &stream.User{UID: uid}
				for _, gid := range gids {
					if gid >= math.MaxUint32 {
						return usagef("--gid %d: a group id is below %d", gid, uint32(math.MaxUint32))
					}
					ids.GIDs = append(ids.GIDs, uint32(gid))
				}
			}
			if none {
				return stream.SetUser(file, args[0], "", ids)
			}
			line, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			password := strings.TrimRight(line, "\r\n")
			if password == "" {
				return usagef("the input has no password: give it as the first line, or --no-password")
			}
			return stream.SetUser(file, args[0], password, ids)
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "file of the users")
	cmd.Flags().Uint32Var(&uid, "uid", 0, "user id of the user")
	cmd.Flags().UintSliceVar(&gids, "gid", nil, "group ids of the user")
	cmd.Flags().BoolVar(&none, "no-password", false, "read no password")
	return cmd
}
