// Package failover owns the test of the clients' view when metadata servers die, stand still, are
// cut off from etcd, are stopped and started: real servers as processes of their own, a real
// etcd, clients that keep creating and reading, and checkers of the clients' answers; and the
// test of the writers' view when chunk servers go and are replaced as well.
package failover
