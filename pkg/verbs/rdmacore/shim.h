// The narrow side of libibverbs and librdmacm: what Go calls, in types that hold no Go pointer. shim.c has the bodies.
#ifndef NFSRDMAD_RDMACORE_SHIM_H
#define NFSRDMAD_RDMACORE_SHIM_H

#include <stdint.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

// All functions that return int return 0 or a negative errno, unless their comment says otherwise.

// rc_load opens the libraries. On failure it puts the reason into why.
int rc_load(char *why, int size);

// A rc_event is a connection event, copied. Until it is acknowledged, what destroys its connection id waits, so that the id is not another's meanwhile.
struct rc_event {
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct rdma_cm_id *listener;
	int32_t kind;
	int32_t status;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t private_len;
	uint8_t private_data[256];
};

int rc_open_channel(struct rdma_event_channel **out);
void rc_close_channel(struct rdma_event_channel *ch);
// rc_next_event returns -EAGAIN when there is none: the channel must not block.
int rc_next_event(struct rdma_event_channel *ch, struct rc_event *out);
void rc_ack_event(struct rc_event *ev);

// Connection ids. Addresses are struct sockaddr_in or sockaddr_in6; timeouts are in milliseconds.
int rc_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **out);
int rc_destroy_id(struct rdma_cm_id *id);
int rc_resolve_addr(struct rdma_cm_id *id, void *addr, int timeout);
int rc_resolve_route(struct rdma_cm_id *id, int timeout);
int rc_listen(struct rdma_cm_id *id, void *addr, int backlog);
int rc_connect(struct rdma_cm_id *id, const void *data, int len, int responder_resources, int initiator_depth);
int rc_accept(struct rdma_cm_id *id, const void *data, int len, int responder_resources, int initiator_depth);
int rc_reject(struct rdma_cm_id *id, const void *data, int len);
int rc_disconnect(struct rdma_cm_id *id);
int rc_comm_established(struct rdma_cm_id *id);
// rc_address copies the local (or the peer's) address to out, of at least sizeof(struct sockaddr_in6).
void rc_address(struct rdma_cm_id *id, int peer, void *out);

// Devices. rc_devices opens all of them, and returns a list that ends with NULL, or NULL. librdmacm closes none of it while the list is held: rc_let_go
// ends that, and frees the list. As what is counted is the entries, free(list) after making a list of one of each by rc_hold_of gives each a hold of its own.
struct ibv_context **rc_devices(int *n);
struct ibv_context **rc_hold_of(struct ibv_context *ctx);
void rc_let_go(struct ibv_context **hold);
// rc_device_path is the device's place in sysfs.
const char *rc_device_path(struct ibv_context *ctx);
// rc_cut_off gives the kernel back what the context has open of the device, and leaves the context as it is, for librdmacm to close: its
// descriptors stand for /dev/null from now on. Nothing of the device may be in use.
int rc_cut_off(struct ibv_context *ctx);
int rc_is_cut_off(struct ibv_context *ctx);
// rc_port_state is the state of a port (enum ibv_port_state), or a negative errno.
int rc_port_state(struct ibv_context *ctx, int port);
// rc_port is the port of the device that a connection id uses.
int rc_port(struct rdma_cm_id *id);
const char *rc_device_name(struct ibv_context *ctx);
int rc_is_iwarp(struct ibv_context *ctx);
int rc_query_device(struct ibv_context *ctx, struct ibv_device_attr *out);
// rc_try_window reports 0 if a type-2 memory window can be allocated.
int rc_try_window(struct ibv_context *ctx);
// A rc_async is an asynchronous event. Until it is acknowledged, what destroys its queue pair waits.
struct rc_async {
	struct ibv_async_event event;
	struct ibv_qp *qp;
	int32_t kind;
	int32_t port;
};

// rc_next_async takes an asynchronous event; -EAGAIN when there is none.
int rc_next_async(struct ibv_context *ctx, struct rc_async *out);
void rc_ack_async(struct rc_async *ev);

// Memory.
int rc_alloc_pd(struct ibv_context *ctx, struct ibv_pd **out);
int rc_dealloc_pd(struct ibv_pd *pd);
int rc_reg_mr(struct ibv_pd *pd, void *addr, uint64_t len, int access, struct ibv_mr **out);
int rc_dereg_mr(struct ibv_mr *mr);
int rc_alloc_mw(struct ibv_pd *pd, struct ibv_mw **out);
int rc_dealloc_mw(struct ibv_mw *mw);

// Completion queues. A channel belongs to each.
int rc_create_cq(struct ibv_context *ctx, int depth, struct ibv_comp_channel **ch, struct ibv_cq **out);
int rc_destroy_cq(struct ibv_cq *cq, struct ibv_comp_channel *ch);
// A bare one has no channel.
int rc_create_bare_cq(struct ibv_context *ctx, int depth, struct ibv_cq **out);
int rc_destroy_bare_cq(struct ibv_cq *cq);
int rc_arm_cq(struct ibv_cq *cq);
// rc_take_cq_event takes an event off the channel and acknowledges it; -EAGAIN when there is none.
int rc_take_cq_event(struct ibv_comp_channel *ch);
// A rc_wc is a work completion.
struct rc_wc {
	uint64_t wr_id;
	uint32_t status;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t flags;
	uint32_t invalidated_rkey;
	uint32_t reserved;
};

#define RC_POLL_BATCH 32
// rc_poll_cq returns the number of completions that it wrote to out, RC_POLL_BATCH at most, or a negative errno.
int rc_poll_cq(struct ibv_cq *cq, struct rc_wc *out);

// Queue pairs.
int rc_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_cq *send, struct ibv_cq *recv,
                 int max_send_wr, int max_recv_wr, int max_send_sge, struct ibv_qp **out);
void rc_destroy_qp(struct rdma_cm_id *id);
int rc_fail_qp(struct ibv_qp *qp);

// A rc_wr is a work request for the send queue, with its SGEs at an index into an array of them.
struct rc_wr {
	uint64_t wr_id;
	uint64_t remote_addr;
	uint64_t bind_addr;
	uint64_t bind_len;
	struct ibv_mw *mw;
	struct ibv_mr *mr;
	uint32_t rkey;       // the peer's, or the new key of a bind
	uint32_t invalidate;
	uint32_t opcode;     // enum ibv_wr_opcode
	uint32_t flags;      // enum ibv_send_flags
	uint32_t first_sge;
	uint32_t num_sge;
	uint32_t bind_access;
	uint32_t reserved;
};

// rc_post_send posts wrs[0..n) as one chain. scratch has room for n requests. *posted is how many were queued.
int rc_post_send(struct ibv_qp *qp, const struct rc_wr *wrs, int n, struct ibv_sge *sges, struct ibv_send_wr *scratch, int *posted);
int rc_post_recv(struct ibv_qp *qp, uint64_t wr_id, void *addr, uint32_t len, uint32_t lkey);
// rc_post_marker posts a signaled empty RDMA Write to a queue pair in the error state, to be flushed.
int rc_post_marker(struct ibv_qp *qp, uint64_t wr_id);

#endif
